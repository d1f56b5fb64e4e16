"""Embeddings of n-grams: rows of a frozen table that stays in its file, added to residual streams."""
