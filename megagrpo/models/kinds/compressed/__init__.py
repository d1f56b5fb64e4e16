"""Compressed attention: a window, and keys that stand for several tokens each."""
