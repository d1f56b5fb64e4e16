"""Before and after a run: check a plan, translate, compare, look. The core never imports it; `cli` finds it by name."""
