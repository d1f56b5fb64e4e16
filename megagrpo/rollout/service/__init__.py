"""The rollout service: Ray places engines, a supervisor watches each, sglang-router stands in front. The only package that imports ray."""
