"""Holds the learner, the only package that imports Megatron; host.prepare_host() comes before its other modules."""
