"""What bench/gpu.py measures on one GPU: a module for each kind of section, and what runs them
apart."""
