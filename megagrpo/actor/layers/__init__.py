"""Layers that differ from Megatron-Core's own."""
