"""The resources of one process: environment, children, run folder, and how it ends."""
