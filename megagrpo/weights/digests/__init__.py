"""Digests of live parameters."""
