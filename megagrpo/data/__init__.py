"""Prompt files to token ids, in a reproducible order."""
