"""Records inputs and outputs of a live model's modules by forward hooks, which a replayed CUDA
graph does not run.

Inside an engine, weights/engines/loader.py runs OPERATIONS for requests that name this module.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.weights.engines.loader import forget_images

TOWER_MODULE = "visual.module"  # the vision tower in the actor's model
# SGLang calls this method of a norm, which bypasses hooks, if an all-reduce is fused with it; with
# the same results.
_FUSED = "forward_with_allreduce_fusion"


class Tap(NamedTuple):
    """One tensor of one module to record."""

    key: str  # under which it is recorded
    module: str  # dotted path in the model
    # "in": an argument | "out": a result | "gating": Megatron's router logits of its first argument
    side: str
    item: int = 0  # position of the argument, or of the result if that is a tuple


class SeenTokens(NamedTuple):
    """The n real tokens of one tap on one rank in one micro-batch."""

    key: str
    tp_rank: int
    rows: Tensor  # [n] int64, of the batch
    columns: Tensor  # [n] int64
    values: Tensor  # [n, w], on the host


def experts_key(layer: int) -> str:
    """Returns the key of the tap on a layer's map of experts [tokens, experts]."""
    return f"layers.{layer}.experts"


class Recorder:
    """Copies the tapped tensors to the host, one for each call, until `remove`."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], taps: Sequence[Tap]):
        tapped = [(tap, modules[tap.module]) for tap in taps if tap.module in modules]
        self.missing = sorted({tap.module for tap in taps} - modules.keys())
        self.seen: dict[str, list[Tensor]] = {tap.key: [] for tap, _ in tapped}
        self.problems: list[str] = []
        self._hooks = ExitStack()
        for tap, module in tapped:
            handle = module.register_forward_hook(self._hook(tap), with_kwargs=True)
            self._hooks.callback(handle.remove)
            if hasattr(module, _FUSED):
                setattr(module, _FUSED, self._fused(tap, module, getattr(module, _FUSED)))
                self._hooks.callback(vars(module).pop, _FUSED, None)  # the class has its own

    def _hook(self, tap: Tap) -> Callable[[torch.nn.Module, tuple, dict, object], None]:
        def record(module: torch.nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            value = _value(tap, module, [*args, *kwargs.values()], output)
            if isinstance(value, Tensor):
                self.seen[tap.key].append(value.detach().to("cpu", copy=True))
            elif (line := f"{tap.module}: {tap.side} {tap.item} is no tensor") not in self.problems:
                self.problems.append(line)

        return record

    def _fused(
        self, tap: Tap, module: torch.nn.Module, original: Callable[..., object]
    ) -> Callable[..., object]:
        record = self._hook(tap)

        def forward(*args: object, **kwargs: object) -> object:
            before = len(self.seen[tap.key])
            output = original(*args, **kwargs)
            if len(self.seen[tap.key]) == before:  # else it has called the module itself
                record(module, args, kwargs, output)
            return output

        return forward

    def remove(self) -> None:
        """Removes the hooks; the recorded tensors stay."""
        self._hooks.close()


def _value(tap: Tap, module: torch.nn.Module, args: list, output: object) -> object:
    if tap.side == "gating":
        return module.gating(args[0])  # type: ignore[operator]  # torch's stub: an attribute is a Tensor or a Module
    if tap.side == "out":
        args = list(output) if isinstance(output, tuple | list) else [output]
    return args[tap.item] if tap.item < len(args) else None


_captures: "weakref.WeakKeyDictionary[torch.nn.Module, Recorder]" = weakref.WeakKeyDictionary()


def _capture(model: torch.nn.Module, request: Mapping) -> dict:
    """Starts to record what `taps` see, of images too. missing: modules that this rank's model
    does not have."""
    forget_images(model)
    if (earlier := _captures.pop(model, None)) is not None:
        earlier.remove()
    taps = [Tap(*tap) for tap in request["taps"]]
    _captures[model] = Recorder(dict(model.named_modules()), taps)
    return {"missing": _captures[model].missing}


def _read(model: torch.nn.Module, request: Mapping) -> dict:
    """Ends the capture and writes it to `file`: a list of tensors for each tap."""
    capture = _captures.pop(model)
    capture.remove()
    torch.save(capture.seen, request["file"])
    return {"problems": capture.problems}


OPERATIONS = {"capture": _capture, "read": _read}
