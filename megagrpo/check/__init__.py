"""Checks before a run: problems of the experiment, of its model and data, and of this machine."""
