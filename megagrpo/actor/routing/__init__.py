"""Additions to the routers of experts: replay, auxiliary losses, bias updates."""
