"""The points inside a layer at which engines and trainers can be compared, by the names that SGLang
and Megatron give their modules."""

from typing import Literal

# how tensor-parallel ranks hold a point: replicated; sharded by heads; sharded by heads of queries,
# keys and values; ids or weights of experts, compared as a map or as the share of each expert
Layout = Literal["whole", "heads", "qkv", "map", "shares"]
At = str | tuple[str, str, int]  # a module, of which it is the output, or its side and item
# name, words, the module in the engine's and in the trainers' layer, layout
Row = tuple[str, str, At, At, Layout]


def under(path: str, at: At) -> At:
    """Returns a module, or a side of one, that stands inside the module `path`; "": not inside."""
    if not path:
        return at
    return f"{path}.{at}" if isinstance(at, str) else (f"{path}.{at[0]}", *at[1:])
