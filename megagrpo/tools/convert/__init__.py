"""Experiments of verl, ROLL, slime and miles as megagrpo's: `megagrpo convert`."""
