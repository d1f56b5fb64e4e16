"""Records what modules of a live model take and give, by forward hooks: of an engine and of the actor alike.

Hooks see nothing of what a CUDA graph replays.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What SGLang calls of a norm, past its hooks, where an all-reduce is fused with it; with the same results.
_FUSED = "forward_with_allreduce_fusion"


class Tap(NamedTuple):
    """Says what to record of one module."""

    key: str  # under which it is found again
    module: str  # dotted path
    side: str  # "in": an argument | "out": a result | "gating": what Megatron's router computes of its first argument
    place: int = 0  # of the argument, or of the result where that is a tuple


class LayerTap(NamedTuple):
    """Says what to record of one module of a layer, or of the model."""

    tap: Tap  # its module as seen from the layer, or from the model
    layer: int | None  # counted from 0 in the whole model; None: of the model


class SeenTokens(NamedTuple):
    """Holds what one rank saw of one tap in one micro-batch, of n real tokens."""

    key: str
    tp_rank: int
    rows: Tensor  # [n] int64, of the batch
    columns: Tensor  # [n] int64
    values: Tensor  # [n, w], on the host


def experts_key(layer: int) -> str:
    """Returns the key of a tap that sees a layer's map of experts [tokens, experts]."""
    return f"layers.{layer}.experts"


class Recorder:
    """Keeps copies on the host of what taps see, one for each call, until `remove`."""

    def __init__(self, tapped: Iterable[tuple[Tap, torch.nn.Module]]):
        tapped = list(tapped)
        self.seen: dict[str, list[Tensor]] = {tap.key: [] for tap, _ in tapped}
        self.problems: list[str] = []
        self._handles = [module.register_forward_hook(self._hook(tap), with_kwargs=True) for tap, module in tapped]
        self._wrapped = [module for tap, module in tapped if hasattr(module, _FUSED)]
        for tap, module in tapped:
            if hasattr(module, _FUSED):
                setattr(module, _FUSED, self._fused(tap, module, getattr(module, _FUSED)))

    def _hook(self, tap: Tap) -> Any:
        def record(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            value = _value(tap, module, [*args, *kwargs.values()], output)
            if isinstance(value, Tensor):
                self.seen[tap.key].append(value.detach().to("cpu", copy=True))
            elif (line := f"{tap.module}: {tap.side} {tap.place} is no tensor") not in self.problems:
                self.problems.append(line)

        return record

    def _fused(self, tap: Tap, module: torch.nn.Module, original: Any) -> Any:
        record = self._hook(tap)

        def forward(*args: Any, **kwargs: Any) -> Any:
            before = len(self.seen[tap.key])
            output = original(*args, **kwargs)
            if len(self.seen[tap.key]) == before:  # else it has called the module itself
                record(module, args, kwargs, output)
            return output

        return forward

    def remove(self) -> None:
        """Takes the hooks out; what they saw stays."""
        for handle in self._handles:
            handle.remove()
        for module in self._wrapped:
            vars(module).pop(_FUSED, None)  # the class has its own
        self._handles, self._wrapped = [], []


def _value(tap: Tap, module: torch.nn.Module, args: list, output: Any) -> Any:
    if tap.side == "gating":
        return module.gating(args[0])  # type: ignore[operator]  # torch takes it for a Tensor or a Module
    if tap.side == "out":
        args = list(output) if isinstance(output, tuple | list) else [output]
    return args[tap.place] if tap.place < len(args) else None


def tapped_modules(model: torch.nn.Module, taps: Iterable[Tap]) -> tuple[list[tuple[Tap, torch.nn.Module]], list[str]]:
    """Returns the taps whose modules `model` has, with these, and the paths that it has not."""
    modules = dict(model.named_modules())
    taps = list(taps)
    found = [(tap, modules[tap.module]) for tap in taps if tap.module in modules]
    return found, sorted({tap.module for tap in taps} - modules.keys())
