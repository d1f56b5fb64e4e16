"""Experts behind a square root of a softplus, which in the first layers a table chooses."""
