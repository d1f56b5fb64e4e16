"""Our only code inside an SGLang engine: `--custom-weight-loader megagrpo.weights.engine_loader.run`.

SGLang calls `run` in every rank of the engine. It answers two questions of trainer rank 0: "record" (what does this
rank copy from which HF tensor?) and "digest" (what do the live parameters hold?). It never raises: an exception here
ends the server.
"""

import sys
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from torch._C

from megagrpo.weights.digest import slice_digest
from megagrpo.weights.mailbox import decode, encode
from megagrpo.weights.record import Recording, Specs, coverage_problems, record

_CONNECT_S = 30.0
# By model: what `_record` found, for every later `_digest`.
_recordings: weakref.WeakKeyDictionary[torch.nn.Module, Recording] = weakref.WeakKeyDictionary()


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


def record_engine_model(model: torch.nn.Module, specs: Specs) -> Recording:
    """Records what a model of SGLang copies from these HF tensors into its parameters and buffers."""
    with _threads_run_inline():  # some loaders copy in worker threads, which a dispatch mode does not see
        # type: ignore, because torch takes every attribute of a module for a Tensor or a Module.
        return record(
            lambda hf: model.load_weights(list(hf.items())),  # type: ignore[operator]
            specs,
            dict(model.named_parameters()) | dict(model.named_buffers()),
        )


def _record(model: torch.nn.Module, request: dict, store: TCPStore) -> dict:
    """Returns the copies of this rank; problems: parameters that some HF tensors do not fill exactly once."""
    specs = {
        name: (tuple(shape), getattr(torch, dtype))
        for name, (shape, dtype) in decode(store.get(request["specs"])).items()
    }
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    recording = record_engine_model(model, specs)
    _recordings[model] = recording
    return {
        "copies": [(c.hf, c.start, c.size, c.parameter, c.offset, c.strides) for c in recording.copies],
        "problems": coverage_problems(recording, parameters),
        "derived": _derived_tensors(model, [*parameters.values(), *buffers.values()]),
    }


def _digest(model: torch.nn.Module, request: dict, store: TCPStore) -> dict:
    """Returns the digest, in the published dtype, of what the live parameters hold of every recorded copy.

    Problems: copies whose live values the published dtype cannot represent, and constants that have changed.
    """
    recording, dtype = _recordings[model], getattr(torch, request["dtype"])
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    digests, problems = [], []
    with torch.no_grad():
        for copy in recording.copies:
            values = copy.view(live)
            published = values.to(dtype)
            if values.dtype != dtype and not torch.equal(published.to(values.dtype), values):
                problems.append(
                    f"parameter {copy.parameter}, HF tensor {copy.hf} {copy.box}: "
                    f"holds values that {dtype} cannot represent"
                )
            digests.append(slice_digest(published, copy.box))
        for fill in recording.fills:
            tensor = live[fill.parameter]
            values = tensor.detach().as_strided(fill.size, fill.strides, tensor.storage_offset() + fill.offset)
            if not bool((values == fill.value).all()):
                problems.append(
                    f"parameter {fill.parameter}: elements that the loader sets to {fill.value} hold something else"
                )
    return {"digests": torch.stack(digests).tolist() if digests else [], "problems": problems}


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
