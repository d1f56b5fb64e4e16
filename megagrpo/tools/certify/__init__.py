"""Evidence that no layout changes the mathematics of an experiment: `megagrpo certify`."""
