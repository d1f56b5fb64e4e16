"""Copy lists: the slices that a model's own loader copies into its parameters."""
