"""How files hold tensors."""
