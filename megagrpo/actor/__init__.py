"""The learner. The only package that imports Megatron-Core; host.prepare_host() must run before its
other modules."""
