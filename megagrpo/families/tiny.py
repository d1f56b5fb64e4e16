"""Checks what the tiny test models of several families have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megagrpo.config.schema import TinyModelConfig


def heads_fill_hidden(sizes: TinyModelConfig) -> list[str]:
    """Returns a problem when num_heads x head_dim is not hidden_size: these families have no head_dim."""
    if sizes.num_heads * sizes.head_dim == sizes.hidden_size:
        return []
    return [
        f"{sizes.family} needs num_heads x head_dim = hidden_size, "
        f"not {sizes.num_heads} x {sizes.head_dim} != {sizes.hidden_size}"
    ]
