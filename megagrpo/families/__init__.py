"""Describes the model families, one module each, listed in table.py; imports neither torch nor Megatron."""
