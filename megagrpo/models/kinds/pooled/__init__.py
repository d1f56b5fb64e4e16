"""Pooled sparse attention: an indexer chooses blocks of keys by their means."""
