"""Gated residual: several residual streams, mixed by gates of low rank around each part of a layer."""
