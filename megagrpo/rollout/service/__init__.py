"""The rollout service: Ray places engines, and a supervisor watches each.

No other package imports ray.
"""
