"""Names the container that Megatron's fused MLP is annotated with; operations of it are not here."""


class Sequential:
    """Raises NotImplementedError."""

    def __init__(self, *args):
        raise NotImplementedError("the stand-in for Transformer Engine has no operation-based layers")


class FusibleOperation:
    """Is named, and nothing else."""
