"""Prepares the host as `host.py` does, for layers of Transformer Engine's stand-in. Comes before Megatron."""

from megagrpo.actor.host import prepare_host

DEVICE = prepare_host("cpu", True)
