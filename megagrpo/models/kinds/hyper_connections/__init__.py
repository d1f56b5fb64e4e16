"""Hyper-connections: several residual streams, mixed around each part of a layer."""
