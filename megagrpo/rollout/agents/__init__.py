"""Rollouts of several turns, which an environment answers and rewards."""
