"""A run's state on disk: how it is saved, listed and resumed."""
