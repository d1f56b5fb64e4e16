"""The kinds of layers, one folder each."""
