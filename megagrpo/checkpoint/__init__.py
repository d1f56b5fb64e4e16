"""The state of a run on disk: written, found, and resumed from."""
