"""Our only code inside an SGLang engine: `--custom-weight-loader megagrpo.weights.engine_loader.run`.

SGLang calls `run` in every rank of the engine, for what trainer rank 0 asks: "record" (what does this rank copy from
which HF tensor?), "receive" (take these slices from these trainer ranks into the live parameters), "digest" (what do
they hold now?) and "leave" (forget the trainers). It never raises: an exception here ends the server.
"""

import sys
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from torch._C

from megagrpo.weights.clock import Deadline
from megagrpo.weights.digest import slice_digest
from megagrpo.weights.group import EngineGroup, PeerLost, join_group
from megagrpo.weights.mailbox import address_towards, decode, encode
from megagrpo.weights.moving import receive_batches
from megagrpo.weights.record import Recording, coverage_problems, record
from megagrpo.weights.reshard_plan import Batches, Message, Place

_CONNECT_S = 30.0
# By model: what `_record` found, for every later `_digest`.
_recordings: weakref.WeakKeyDictionary[torch.nn.Module, Recording] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _EngineEnd:
    """This rank's end of the link to the trainers, and what it receives in every publish."""

    group: EngineGroup
    batches: Batches


_ends: weakref.WeakKeyDictionary[torch.nn.Module, _EngineEnd] = weakref.WeakKeyDictionary()


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
            if not bool((fill.view(live) == fill.value).all()):
                problems.append(
                    f"parameter {fill.parameter}: elements that the loader sets to {fill.value} hold something else"
                )
    return {"digests": torch.stack(digests).tolist() if digests else [], "problems": problems}


def _receive(model: torch.nn.Module, request: dict, store: TCPStore) -> dict:
    """Fills the live parameters from the trainers. Returns bytes staged at most, and why the trainers were lost."""
    deadline = Deadline(request["left_s"])
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    try:
        end = _ends.get(model)
        if end is None or end.group.name != request["group"]:
            end = _join(model, request, store)
        traffic = receive_batches(
            end.group,
            end.batches,
            live,
            getattr(torch, request["dtype"]),
            lambda: Deadline(min(request["patience_s"], deadline.left)),
        )
    except PeerLost as exc:
        _leave(model, request, store)
        return {"lost": str(exc), "staging_bytes": 0}
    for fill in _recordings[model].fills:  # an engine may have started with anything in its parameters
        fill.view(live).fill_(fill.value)
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()  # type: ignore[operator]  # torch takes it for a Tensor or a Module
    return {"lost": "", "staging_bytes": traffic.staging_bytes}


def _join(model: torch.nn.Module, request: dict, store: TCPStore) -> _EngineEnd:
    """Joins the group of a new link, which replaces that of earlier trainers."""
    _leave(model, request, store)
    plan = decode(store.get(request["plan"]))
    store.delete_key(request["plan"])
    host, port = request["mailbox"]
    device = next(model.parameters()).device
    trainers = request["size"] - request["num_ranks"]
    store.set(f"{request['group']}/ready/{request['rank'] - trainers}", "")
    group = join_group(
        store,
        request["group"],
        request["rank"],
        request["size"],
        device,
        address_towards(f"tcp://{host}:{port}"),
        request["join_s"],
    )
    group.set_timeout(request["left_s"])
    batches = [
        [
            Message(peer, tag, tuple(Place(name, at, tuple(n), tuple(s)) for name, at, n, s in places))
            for peer, tag, places in batch
        ]
        for batch in plan
    ]
    _ends[model] = _EngineEnd(group, batches)
    return _ends[model]


def _leave(model: torch.nn.Module, request: dict, store: TCPStore) -> dict:
    """Forgets the trainers, whatever state they are in."""
    end = _ends.pop(model, None)
    if end is not None:
        end.group.abort()
    return {}


_OPERATIONS = {"record": _record, "receive": _receive, "digest": _digest, "leave": _leave}


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
