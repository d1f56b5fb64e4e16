"""Megatron-Core's configuration objects and model, built from an experiment."""
