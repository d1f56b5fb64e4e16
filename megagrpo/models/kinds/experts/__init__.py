"""Experts, of which a router chooses some for each token."""
