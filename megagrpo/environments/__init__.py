"""Environments and agent programs that ship with the package, by their short names."""
