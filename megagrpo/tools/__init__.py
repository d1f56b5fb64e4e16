"""Before and after a run: check a plan, warm up, translate, compare, look, export.

The core never imports it; `cli` finds it by name.
"""
