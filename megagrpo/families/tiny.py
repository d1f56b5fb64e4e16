"""What a family is told of a tiny test model, and a check that several families share."""

from typing import Protocol


class TinySizes(Protocol):
    """The sizes of a tiny model; the section prepare.model of an experiment has them."""

    @property
    def family(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def expert_ffn_size(self) -> int: ...


def heads_fill_hidden(sizes: TinySizes) -> list[str]:
    """Returns a problem when num_heads x head_dim is not hidden_size: these families have no head_dim."""
    if sizes.num_heads * sizes.head_dim == sizes.hidden_size:
        return []
    return [
        f"{sizes.family} needs num_heads x head_dim = hidden_size, "
        f"not {sizes.num_heads} x {sizes.head_dim} != {sizes.hidden_size}"
    ]


def experts_suffice(sizes: TinySizes) -> list[str]:
    """Returns a problem when a token would meet more experts than there are."""
    if sizes.experts_per_token > sizes.num_experts:
        return [f"experts_per_token {sizes.experts_per_token} is more than num_experts {sizes.num_experts}"]
    return []
