"""The tensors of a draft beside those of its layer."""

from collections.abc import Iterator

from megagrpo.models.architecture import Architecture
from megagrpo.models.tensors import TensorSpec, layer_prefix


def draft_norms(arch: Architecture) -> Iterator[TensorSpec]:
    """Yields what a draft has besides its layer: the norms of both inputs, their projection, and
    the last norm."""
    prefix = layer_prefix(arch.num_layers)
    hidden = arch.hidden_size
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield TensorSpec(f"{prefix}{name}.weight", (hidden,), "norm")
    yield TensorSpec(prefix + "eh_proj.weight", (hidden, 2 * hidden), "matrix")
