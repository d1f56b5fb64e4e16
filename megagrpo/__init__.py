"""megagrpo: GRPO for very large language models, Megatron-Core actors and SGLang rollouts."""

__version__ = "0.1.0"
