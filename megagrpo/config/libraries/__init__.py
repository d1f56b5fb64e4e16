"""The settings of Megatron-Core and SGLang that an experiment may set."""
