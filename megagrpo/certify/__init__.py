"""Gives evidence that the layout does not change the mathematics of one experiment: `megagrpo certify`."""
