"""The experiment: its schema, its algorithm section, its presets, and how a YAML file becomes one.
Loads no torch."""
