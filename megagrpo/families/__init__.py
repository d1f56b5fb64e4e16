"""Model families, one module each in models/, listed in table.py; imports neither torch nor Megatron."""
