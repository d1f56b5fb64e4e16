"""Sampling: the Ray-supervised SGLang service, its HTTP client, and the source of the loop's
groups."""
