"""Prepares the host for Megatron. Workers import it before anything that imports Megatron, as loop/ranks.py does."""

from megagrpo.actor.host import prepare_host

DEVICE = prepare_host()
