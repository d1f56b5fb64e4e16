"""Experiments of verl, ROLL, TRL, slime and miles as megagrpo's: `megagrpo convert`."""
