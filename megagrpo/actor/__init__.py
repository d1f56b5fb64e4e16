"""The learner. The only package that imports megatron, which on a machine without CUDA first needs host.py."""

from megagrpo.actor.host import prepare_host

DEVICE = prepare_host()
