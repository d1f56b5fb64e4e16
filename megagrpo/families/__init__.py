"""Model families, one class each in models/, listed in table.py; imports neither torch nor
Megatron."""
