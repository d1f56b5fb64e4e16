"""Which slice of which tensor a model's own loader copies where."""
