"""`megagrpo certify`: evidence that the layout does not change the mathematics, for one experiment's architecture and algorithm."""
