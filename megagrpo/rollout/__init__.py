"""Sampling: the supervised SGLang service, its clients, and the source of the loop's groups."""
