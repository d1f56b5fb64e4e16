"""The model families: one module each, listed in table.py. Nothing here imports torch or megatron: `megagrpo check` reads it."""
