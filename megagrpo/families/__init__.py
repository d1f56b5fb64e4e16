"""Model families, one class each in models/, listed in table.py; imports no torch and no Megatron."""
