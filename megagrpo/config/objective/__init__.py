"""The parts of the algorithm section."""
