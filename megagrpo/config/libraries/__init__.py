"""Which settings of Megatron-Core and SGLang an experiment may set."""
