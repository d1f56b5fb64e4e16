"""Moves bytes between processes."""
