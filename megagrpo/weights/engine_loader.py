"""Our only code inside an SGLang engine: `--custom-weight-loader megagrpo.weights.engine_loader.run`.

SGLang calls `run` in every rank of the engine. It answers two questions of trainer rank 0: "record" (what does this
rank copy from which HF tensor?) and "digest" (what do the live parameters hold?). It never raises: an exception here
ends the server.
"""

import base64
import sys
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from torch._C

from megagrpo.weights.digest import batched_digest
from megagrpo.weights.digest_batches import CopyBatches
from megagrpo.weights.mailbox import decode, encode
from megagrpo.weights.record import Fill, Recording, coverage_problems, record

_CONNECT_S = 30.0
# By model: what `_record` found, for every later `_digest`.
_recordings: weakref.WeakKeyDictionary[torch.nn.Module, Recording] = weakref.WeakKeyDictionary()
_batches: weakref.WeakKeyDictionary[torch.nn.Module, CopyBatches] = weakref.WeakKeyDictionary()


def run(model: torch.nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Does what the request in `named_tensors` asks and answers through the trainer's mailbox.

    The request is one uint8 tensor [bytes of the encoded message], called "request".
    """
    try:
        request: dict[str, Any] = decode(bytes(dict(named_tensors)["request"].cpu().numpy()))
        host, port = request["mailbox"]
        store = TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S))
        try:
            answer: dict[str, Any] = {"answer": _OPERATIONS[request["operation"]](model, request, store)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        store.set(request["reply"], encode(answer))  # type: ignore[arg-type]  # takes bytes; torch's stub says str
    except Exception:  # no way to answer: the trainer's deadline will say so
        traceback.print_exc(file=sys.stderr)


def _record(model: torch.nn.Module, request: dict, store: TCPStore) -> dict:
    """Returns the copies of this rank; problems: parameters that some HF tensors do not fill exactly once."""
    specs = {
        name: (tuple(shape), getattr(torch, dtype))
        for name, (shape, dtype) in decode(store.get(request["specs"])).items()
    }
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    with _threads_run_inline():  # some loaders copy in worker threads, which a dispatch mode does not see
        # type: ignore, because torch takes every attribute of a module for a Tensor or a Module.
        recording = record(
            lambda hf: model.load_weights(list(hf.items())),  # type: ignore[operator]
            specs,
            parameters | buffers,
        )
    _recordings[model], _batches[model] = recording, CopyBatches(recording.copies)
    return {
        "copies": [(c.hf, c.start, c.size, c.parameter, c.offset, c.strides) for c in recording.copies],
        "problems": coverage_problems(recording, parameters),
        "derived": _derived_tensors(model, [*parameters.values(), *buffers.values()]),
    }


def _digest(model: torch.nn.Module, request: dict, store: TCPStore) -> dict:
    """Returns the digests, in the published dtype, of what the live parameters hold of every recorded copy, in the
    order of `_record`: int64, little-endian, as base64.

    Problems: copies whose live values the published dtype cannot represent, and constants that have changed.
    """
    recording, batches, dtype = _recordings[model], _batches[model], getattr(torch, request["dtype"])
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    found, order, inexact = [], [], []
    with torch.no_grad():
        for box, values, places in batches.views(live, dtype):
            published = values.to(dtype)
            found.append(batched_digest(published, box))
            order.append(places)
            if values.dtype != dtype:
                wrong = (published.to(values.dtype) != values).unsqueeze(-1).flatten(1).any(1)
                inexact += places[wrong.cpu().numpy()].tolist()
        changed = [_differs(fill, live[fill.parameter]) for fill in recording.fills]
    digests = np.empty(len(recording.copies), dtype="<i8")
    if found:
        digests[np.concatenate(order)] = torch.cat(found).cpu().numpy()
    problems = [
        f"parameter {copy.parameter}, HF tensor {copy.hf} {copy.box}: holds values that {dtype} cannot represent"
        for copy in (recording.copies[place] for place in sorted(inexact))
    ]
    problems += [
        f"parameter {fill.parameter}: elements that the loader sets to {fill.value} hold something else"
        for fill, differs in zip(recording.fills, torch.stack(changed).tolist() if changed else [], strict=True)
        if differs
    ]
    return {"digests": base64.b64encode(digests.tobytes()).decode(), "problems": problems}


def _differs(fill: Fill, parameter: Tensor) -> Tensor:
    """Returns whether some element of a filled slice is not the constant, bool []."""
    offset = parameter.storage_offset() + fill.offset
    return (parameter.detach().as_strided(fill.size, fill.strides, offset) != fill.value).any()


_OPERATIONS = {"record": _record, "digest": _digest}


def _derived_tensors(model: torch.nn.Module, known: list[Tensor]) -> list[str]:
    """Returns the names of matrices beside parameters and buffers: perhaps computed from weights, seen by no digest."""
    storages = {t.untyped_storage()._cdata for t in known}
    found = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            matrix = isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2
            if matrix and value.untyped_storage()._cdata not in storages:
                found.append(f"{path}.{name} {tuple(value.shape)}")
    return found


@contextmanager
def _threads_run_inline() -> Iterator[None]:
    """Makes every thread pool of this process run its work at once, in the thread that submits it."""
    original = ThreadPoolExecutor.submit

    def submit(self, function, /, *args, **kwargs):
        future: Future = Future()
        future.set_result(function(*args, **kwargs))
        return future

    ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]  # loaders have imported the class by its name
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = original  # type: ignore[method-assign]  # as above
