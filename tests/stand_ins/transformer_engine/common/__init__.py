"""Holds the recipes."""

from . import recipe

__all__ = ["recipe"]
