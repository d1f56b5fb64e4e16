"""Sampling: the Ray-supervised SGLang service, the HTTP client, and the source that hands groups to the loop."""
