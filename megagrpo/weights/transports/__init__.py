"""The transports of weights."""
