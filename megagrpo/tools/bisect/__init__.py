"""Finds where engine and trainer begin to compute differently: `megagrpo bisect`."""
