"""The learner: the only package that imports Megatron. actor/host.py's prepare_host() comes before its other modules."""
