"""Experiments of verl, ROLL and TRL as megagrpo's: `megagrpo convert`."""
