"""The rollout service: Ray places engines, a supervisor watches each, sglang-router stands in
front.

No other package imports ray.
"""
