"""The learner. The only package that imports megatron."""
