"""Sparse attention, whose keys an indexer chooses."""
