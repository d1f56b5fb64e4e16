"""Our only code inside an SGLang engine: `--custom-weight-loader megagrpo.weights.engines.loader.run`.

SGLang calls `run` in every rank of the engine, for what trainer rank 0 asks: "record" (what does this rank copy from
which HF tensor?), "receive" (take these slices from these trainer ranks into the live parameters), "digest" (what do
they hold now?) and "leave" (forget the trainers); "capture" and "read" are for `megagrpo bisect`. It never raises: an
exception here ends the server.
"""

import base64
import sys
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from torch._C

from megagrpo.weights.copies.record import Copy, Recording, Specs, coverage_problems, record
from megagrpo.weights.copies.views import Box, Place, row_major
from megagrpo.weights.digests.batches import CopyBatches
from megagrpo.weights.digests.digest import batched_digest, slice_digest
from megagrpo.weights.engines.hooks import Recorder, Tap
from megagrpo.weights.transports.reshard_plan import Batches, Message
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.group import EngineGroup, PeerLost, join_group
from megagrpo.weights.wire.handover import take_batches
from megagrpo.weights.wire.mailbox import address_towards, decode, encode
from megagrpo.weights.wire.moving import receive_batches

_CONNECT_S = 30.0
_PATCHING = Lock()
# By model: what `_record` found, for every later `_digest`.
_recordings: weakref.WeakKeyDictionary[torch.nn.Module, Recording] = weakref.WeakKeyDictionary()
_batches: weakref.WeakKeyDictionary[torch.nn.Module, CopyBatches] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _EngineEnd:
    """This rank's end of the link to the trainers, and what it receives in every publish."""

    name: str
    group: EngineGroup | None  # None where batches come through memory
    batches: Batches


@dataclass
class _WholeTensors:
    """HF tensors from which the model's own loader computes parameters, and what came of them in the last transfer."""

    copies: list[Copy]
    specs: Specs  # with published dtypes
    digests: list[int] | None = None  # of the tensors as they arrived, by copy
    results: dict[str, int] = field(default_factory=dict)  # digests of the computed parameters, right after


_whole: weakref.WeakKeyDictionary[torch.nn.Module, _WholeTensors] = weakref.WeakKeyDictionary()
_ends: weakref.WeakKeyDictionary[torch.nn.Module, _EngineEnd] = weakref.WeakKeyDictionary()
_recorders: weakref.WeakKeyDictionary[torch.nn.Module, Recorder] = weakref.WeakKeyDictionary()


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


def _live(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the live parameters and buffers by name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def record_engine_model(model: torch.nn.Module, specs: Specs, allow_computed: bool) -> tuple[Recording, list[Copy]]:
    """Records what a model of SGLang copies from these HF tensors into its parameters and buffers. See `record`.

    Returns too the copies of whole HF tensors that it needs for what it computes.
    """
    with _threads_run_inline():  # some loaders copy in worker threads, which a dispatch mode does not see
        # type: ignore, because torch takes every attribute of a module for a Tensor or a Module.
        recording = record(
            lambda hf: model.load_weights(list(hf.items())),  # type: ignore[operator]
            specs,
            _live(model),
            allow_computed,
        )
    names = sorted(set().union(*(computed.hf for computed in recording.computed.values())))
    return recording, [_whole_copy(name, specs[name][0]) for name in names]


def _record(model: torch.nn.Module, request: dict, store: TCPStore) -> dict:
    """Returns the copies of this rank; problems: what the HF tensors do not fill exactly once."""
    specs = {
        name: (tuple(shape), getattr(torch, dtype))
        for name, (shape, dtype) in decode(store.get(request["specs"])).items()
    }
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    recording, whole = record_engine_model(model, specs, request["allow_computed"])
    _recordings[model], _batches[model] = recording, CopyBatches(recording.copies, specs)
    _whole[model] = _WholeTensors(whole, specs)
    problems = coverage_problems(recording, parameters) + _copies_of_the_start(model)
    if request["dummy_start"]:
        problems += _random_buffers(model, recording)
    return {
        "copies": [astuple(copy) for copy in [*recording.copies, *_whole[model].copies]],
        "problems": problems,
        "computed": {name: computed.how for name, computed in recording.computed.items()},
        "together": sorted(recording.together),
        "derived": _derived_tensors(model),
        "proven": [f"{name} {tuple(live.shape)}" for name, live, _ in _absorbed(model)],
        "post_load": hasattr(model, "post_load_weights"),
    }


def _whole_copy(name: str, shape: tuple[int, ...]) -> Copy:
    """Returns a copy of a whole HF tensor into a buffer of this loader, under a name that no parameter has."""
    return Copy(name, (0,) * len(shape), shape, f"HF tensor {name}", 0, row_major(shape))


def _digest(model: torch.nn.Module, request: dict, store: TCPStore) -> dict:
    """Returns the digests, in the published dtype, of what the live parameters hold of every recorded copy, in the
    order of `_record`: int64, little-endian, as base64.

    Problems: copies whose live values the published dtype cannot represent, constants that have changed, and matrices
    that are not what they are computed from.
    """
    recording, batches = _recordings[model], _batches[model]
    live = _live(model)
    found, order = [], []
    inexact: dict[int, torch.dtype] = {}  # by copy
    with torch.no_grad():
        for box, values, places, dtype in batches.views(live):
            published = values.to(dtype)
            found.append(batched_digest(published, box))
            order.append(places)
            if values.dtype != dtype:
                wrong = (published.to(values.dtype) != values).unsqueeze(-1).flatten(1).any(1)
                inexact |= dict.fromkeys(places[wrong.cpu().numpy()].tolist(), dtype)
        changed = [(fill.view(live) != fill.value).any() for fill in recording.fills]
        absorbed = {name: (has != wanted).any() for name, has, wanted in _absorbed(model)}
    whole = _whole[model]
    digests = np.zeros(len(recording.copies) + len(whole.copies), dtype="<i8")
    if found:
        digests[np.concatenate(order)] = torch.cat(found).cpu().numpy()
    problems = [
        f"parameter {copy.parameter}, HF tensor {copy.hf} {copy.box}: holds values that {dtype} cannot represent"
        for copy, dtype in ((recording.copies[place], inexact[place]) for place in sorted(inexact))
    ]
    problems += [
        f"parameter {fill.parameter}: elements that the loader sets to {fill.value} hold something else"
        for fill, differs in zip(recording.fills, torch.stack(changed).tolist() if changed else [], strict=True)
        if differs
    ]
    problems += [f"{name}: not what the live kv_b_proj.weight gives" for name, differs in absorbed.items() if differs]
    if whole.digests is not None:
        digests[len(recording.copies) :] = whole.digests
        problems += [
            f"parameter {name}: not what the loader has computed of the weights that it was sent last"
            for name, digest in _digests_of_computed(model).items()
            if digest != whole.results[name]
        ]
    return {"digests": base64.b64encode(digests.tobytes()).decode(), "problems": problems}


def _digests_of_computed(model: torch.nn.Module) -> dict[str, int]:
    live = _live(model)
    found = {name: live[name].detach() for name in _recordings[model].computed}
    return {name: int(slice_digest(t, Box((0,) * t.dim(), tuple(t.shape)))) for name, t in found.items()}


def _receive(model: torch.nn.Module, request: dict, store: TCPStore) -> dict:
    """Fills the live parameters from the trainers. Returns bytes staged at most, and why the trainers were lost."""
    live = _live(model)
    lost = ""
    try:
        staging_bytes = _take(model, request, store, live)
    except PeerLost as exc:
        lost = str(exc)
    if lost:  # outside of the handler: the exception holds the frames that hold the group
        _leave(model, request, store)
        return {"lost": lost, "staging_bytes": 0}
    for fill in _recordings[model].fills:  # an engine may have started with anything in its parameters
        fill.view(live).fill_(fill.value)
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()  # type: ignore[operator]  # torch takes it for a Tensor or a Module
    return {"lost": "", "staging_bytes": staging_bytes}


def _take(model: torch.nn.Module, request: dict, store: TCPStore, live: dict[str, Tensor]) -> int:
    """Receives everything once, joining the trainers first if need be. Returns bytes staged at most."""
    deadline = Deadline(request["left_s"])
    end = _ends.get(model)
    if end is None or end.name != request["group"]:
        end = _join(model, request, store)
    whole, device = _whole[model], next(model.parameters()).device
    sent = {
        copy.parameter: torch.empty(copy.size, dtype=whole.specs[copy.hf][1], device=device) for copy in whole.copies
    }
    staging_bytes, patience_s = 0, request["patience_s"]
    if end.group is None:
        take_batches(store, request["memory"], end.batches, live | sent, device, deadline, patience_s)
    else:
        staging_bytes = receive_batches(end.group, end.batches, live | sent, deadline, patience_s).staging_bytes
    if sent:  # the stock way, for these alone
        whole.digests = [int(slice_digest(sent[copy.parameter], copy.box)) for copy in whole.copies]
        model.load_weights([(copy.hf, sent[copy.parameter]) for copy in whole.copies])  # type: ignore[operator]
        whole.results = _digests_of_computed(model)
    return staging_bytes + sum(tensor.nbytes for tensor in sent.values())


def _join(model: torch.nn.Module, request: dict, store: TCPStore) -> _EngineEnd:
    """Learns the plan of a new link, which replaces that of earlier trainers, and joins its group if it has one."""
    _leave(model, request, store)
    batches = _read_plan(decode(store.get(request["plan"])))
    store.delete_key(request["plan"])
    if "memory" in request:
        _ends[model] = _EngineEnd(request["group"], None, batches)
        return _ends[model]
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
    _ends[model] = _EngineEnd(request["group"], group, batches)
    return _ends[model]


def _read_plan(plan: list) -> Batches:
    return [
        [
            Message(
                peer,
                tag,
                getattr(torch, dtype),
                tuple(Place(name, at, tuple(n), tuple(s)) for name, at, n, s in places),
            )
            for peer, tag, dtype, places in batch
        ]
        for batch in plan
    ]


def _leave(model: torch.nn.Module, request: dict, store: TCPStore) -> dict:
    """Forgets the trainers, whatever state they are in."""
    end = _ends.pop(model, None)
    if end is not None and end.group is not None:
        end.group.abort()
    return {}


def _capture(model: torch.nn.Module, request: dict, store: TCPStore) -> dict:
    """Starts recording the request's taps. Returns the modules that this rank's model does not have."""
    if (earlier := _recorders.pop(model, None)) is not None:
        earlier.remove()
    recorder = _recorders[model] = Recorder(dict(model.named_modules()), [Tap(*tap) for tap in request["taps"]])
    return {"missing": recorder.missing}


def _read(model: torch.nn.Module, request: dict, store: TCPStore) -> dict:
    """Ends the capture and writes its tensors, a list for each tap, to the request's file."""
    recorder = _recorders.pop(model)
    recorder.remove()
    torch.save(recorder.seen, request["file"])
    return {"problems": recorder.problems}


_OPERATIONS = {
    "record": _record,
    "receive": _receive,
    "digest": _digest,
    "leave": _leave,
    "capture": _capture,
    "read": _read,
}


def _random_buffers(model: torch.nn.Module, recording: Recording) -> list[str]:
    """Returns a line for each buffer that a dummy start fills with random values and no HF tensor overwrites."""
    # SGLang's initialize_dummy_weights fills what the state dict lists, which leaves out non-persistent buffers.
    kept = model.state_dict()
    filled = {copy.parameter for copy in recording.copies} | {fill.parameter for fill in recording.fills}
    return [
        f"buffer {name} {tuple(buffer.shape)}: random since the start; set rollout.load_format: model"
        for name, buffer in model.named_buffers()
        if name in kept and buffer.is_floating_point() and name not in filled
    ]


def _derived_tensors(model: torch.nn.Module) -> list[str]:
    """Returns the names of matrices beside parameters and buffers: perhaps computed from weights, seen by no digest."""
    storages = {t.untyped_storage()._cdata for t in _live(model).values()}
    found = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            matrix = isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2
            if matrix and value.untyped_storage()._cdata not in storages:
                found.append(f"{path}.{name} {tuple(value.shape)}")
    return found


def _copies_of_the_start(model: torch.nn.Module) -> list[str]:
    """Returns a line for each matrix that SGLang gathers once of what an engine starts with, for all ranks."""
    return [
        f"{path}.{name}: no publish brings it up to date; leave out --dcp-replicate-q-proj"
        for path, module in model.named_modules()
        for name in ("w_kc_qrep", "q_b_proj_qrep_weight")
        if getattr(module, name, None) is not None
    ]


def _absorbed(model: torch.nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields name, live values and what they must be of the matrices that latent attention multiplies by instead of
    kv_b_proj: w_kc [heads, nope, rank] and w_vc [heads, rank, v].

    SGLang copies them from kv_b_proj.weight [heads * (nope + v), rank] at the end of load_weights and in
    post_load_weights. Those that it computes otherwise (quantised) are left out.
    """
    for path, module in model.named_modules():
        keys, values = getattr(module, "w_kc", None), getattr(module, "w_vc", None)
        weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
        if keys is None or values is None or weight is None or not keys.dtype == values.dtype == weight.dtype:
            continue
        heads = weight.detach().unflatten(0, (len(keys), -1))  # [heads, nope + v, rank]
        nope, v = keys.shape[1], values.shape[2]
        if heads.shape[1] == nope + v:
            yield f"{path}.w_kc", keys, heads[:, :nope]
            yield f"{path}.w_vc", values, heads[:, nope:].transpose(1, 2)


@contextmanager
def _threads_run_inline() -> Iterator[None]:
    """Makes every thread pool of this process run its work at once, in the thread that submits it."""
    _PATCHING.acquire()  # what is patched belongs to the whole process
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
        _PATCHING.release()
