"""Experts with biases and a clamped SwiGLU, as gpt-oss has them."""
