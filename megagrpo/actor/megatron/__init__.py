"""The settings and the model that Megatron-Core is given."""
