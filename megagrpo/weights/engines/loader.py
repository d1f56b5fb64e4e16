"""SGLang's weight loader in an engine: `--custom-weight-loader megagrpo.weights.engines.loader.run`.

Every rank of the engine calls `run` for each request of trainer rank 0. An exception would end the
server, so `run` reports errors to the mailbox and raises nothing.
"""

import base64
import hashlib
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from importlib import import_module
from threading import Lock
from typing import cast

import numpy as np
import torch
from torch import Tensor

from megagrpo.models.kinds.ngrams.describe import TABLE
from megagrpo.system.processes import route_address
from megagrpo.weights.copies.recorder import Copy, Recording, Specs, coverage_problems, record
from megagrpo.weights.copies.views import Box, row_major
from megagrpo.weights.digests.batches import CopyBatches
from megagrpo.weights.digests.digest import slice_digest
from megagrpo.weights.engines.derived_tensors import (
    absorbed_matrices,
    cache_scales,
    compute_in_place,
    derived_tensors,
    kept_copies,
    live_tensors,
    random_buffers,
    random_cache_scales,
)
from megagrpo.weights.engines.formats import format_problems
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.engine_group import EngineGroup, GroupLimits, PeerLost, join_group
from megagrpo.weights.wire.handover import take_batches
from megagrpo.weights.wire.mailbox import Mailbox, decode, open_mailbox
from megagrpo.weights.wire.moving import receive_batches
from megagrpo.weights.wire.shared_buffer import place_of
from megagrpo.weights.wire.transfer_messages import Batches, ReceiveRequest, decode_batches

_CONNECT_S = 30.0
_PATCHING = Lock()
_ends: "weakref.WeakKeyDictionary[torch.nn.Module, EngineEnd]" = weakref.WeakKeyDictionary()
# by request: the model, until SGLang passes the same request to the draft
_models: dict[str, torch.nn.Module] = {}


def run(model: torch.nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Runs the request, uint8 [bytes] in "request", and puts the answer into the trainer's mailbox.

    Raises nothing. SGLang calls it twice in an engine with a draft, for the model and then for the
    draft; the second call answers for both.
    """
    # without a mailbox the trainer waits until its deadline
    with _reported(lambda text: print(text, file=sys.stderr)):
        request = decode(bytes(dict(named_tensors)["request"].cpu().numpy()))
        key = request["reply"]
        draft = None
        if request["draft"] and key not in _models:
            _models.clear()
            _models[key] = model
            return
        if request["draft"]:
            model, draft = _models.pop(key), model
        store = open_mailbox(request["mailbox"], _CONNECT_S)
        with _reported(lambda text: store.set(key, {"error": text})):
            store.set(key, {"answer": engine_end(model, draft).answer(request, store)})


@contextmanager
def _reported(report: Callable[[str], None]) -> Iterator[None]:
    """Passes the traceback of an exception inside to `report` instead of raising it."""
    try:
        yield
    except Exception:
        report(traceback.format_exc())


@dataclass(frozen=True)
class _Link:
    """This rank's link to the trainers, and the batches that it receives in every publish."""

    name: str
    group: EngineGroup | None  # None if batches come through memory
    batches: Batches


@dataclass
class _Recorded:
    """The result of the request "record", and digests of the last transfer."""

    recording: Recording
    specs: Specs  # with published dtypes
    batches: CopyBatches  # of the recorded copies
    inputs: list[Copy]  # HF tensors from which the model's own loader computes parameters
    arrived: list[int] | None = None  # digests of `inputs` on arrival
    # digests of the computed parameters, right after
    computed: dict[str, int] = field(default_factory=dict)
    # the last values of `inputs`; the next changes are written into them
    last: dict[str, Tensor] = field(default_factory=dict)


class EngineEnd:
    """One engine rank's end of the exchange, with one method per request. In order:

    1. `record`: records once which slices of which HF tensors this rank's model copies.
    2. `receive`: joins the trainers if their link is new, and writes their slices into the live
       parameters.
    3. `digest`: digests the live parameters. 2 and 3 repeat in every publish.
    4. `leave`: forgets the trainers; others may come.

    A tool's request names a `module` instead.
    """

    def __init__(self, model: torch.nn.Module, draft: torch.nn.Module | None = None):
        # weak references, because _ends holds this object as long as the model lives
        self._weak_model = weakref.ref(model)
        self._weak_draft = None if draft is None else weakref.ref(draft)
        self.recorded: _Recorded  # from the first request on
        self.link: _Link | None = None

    def answer(self, request: dict, store: Mailbox) -> dict:
        """Runs the operation that a request names.

        If it names a `module`, the operation is one of that module's OPERATIONS, on the model
        without the draft.
        """
        if "module" in request:
            model = self._weak_model()
            assert model is not None, "SGLang passes the model with every request"
            return import_module(request["module"]).OPERATIONS[request["operation"]](model, request)
        operations: dict[str, Callable[[], dict]] = {
            "record": lambda: self.record(request, store),
            "receive": lambda: self.receive(cast(ReceiveRequest, request), store),
            "digest": self.digest,
            "leave": self.leave,
        }
        return operations[request["operation"]]()

    @property
    def _model(self) -> torch.nn.Module:
        model = self._weak_model()
        draft = None if self._weak_draft is None else self._weak_draft()
        assert model is not None, "SGLang passes the model with every request"
        if draft is None:
            return model
        return WithDraft(model, draft)

    def record(self, request: dict, store: Mailbox) -> dict:
        """Records this rank's copies. Returns their key in the mailbox, which depends only on them:
        of equal ranks one sends its list. problems: elements that HF tensors do not fill exactly
        once, wrong formats."""
        model = self._model
        hf: Specs = {
            name: (tuple(shape), getattr(torch, dtype))
            for name, (shape, dtype) in store.get(request["specs"]).items()
        }
        recording, inputs = record_engine_model(model, hf, request["allow_computed"])
        # a table of n-grams stays as the start has read it
        published = {name: p for name, p in model.named_parameters() if TABLE not in name}
        self.recorded = _Recorded(recording, hf, CopyBatches(recording.copies, hf), inputs)
        problems = [
            *coverage_problems(recording, published),
            *format_problems(recording, live_tensors(model), hf),
            *random_cache_scales(model),
        ]
        if request["dummy_start"]:
            problems += random_buffers(model, recording)
        copies = [astuple(copy) for copy in [*recording.copies, *inputs]]
        key = f"copies/{hashlib.sha256(repr(copies).encode()).hexdigest()}"
        if not store.has(key):
            store.set(key, copies)
        return {
            "copies": key,
            "problems": problems,
            "place": place_of(next(model.parameters()).device),
            "computed": {name: computed.how for name, computed in recording.computed.items()},
            "together": sorted(recording.together),
            "derived": derived_tensors(model),
            "proven": [f"{name} {tuple(live.shape)}" for name, live, _ in absorbed_matrices(model)],
            "post_load": hasattr(model, "post_load_weights"),
        }

    def receive(self, request: ReceiveRequest, store: Mailbox) -> dict:
        """Fills the live parameters from the trainers. Returns the peak of staged bytes, or why the
        trainers were lost."""
        live = live_tensors(self._model)
        lost = ""
        try:
            staging_bytes = self._take(request, store, live)
        except PeerLost as exc:
            lost = str(exc)
        if lost:  # not in the handler, because the exception's frames keep the group alive
            self.leave()
            return {"lost": lost, "staging_bytes": 0}
        # an engine's parameters may start with any values
        for fill in self.recorded.recording.fills:
            fill.view(live).fill_(fill.value)
        for _, kept, expected in kept_copies(self._model):
            kept.copy_(expected)
        if hasattr(self._model, "post_load_weights"):
            self._model.post_load_weights()  # type: ignore[operator]  # torch takes it for a Tensor or a Module
        return {"lost": "", "staging_bytes": staging_bytes}

    def digest(self) -> dict:
        """Returns the digests of all recorded copies' live values in the published dtype, in the
        order of `record`.

        digests: int64, little-endian, as base64. problems: live values that the published dtype
        cannot represent, constants that have changed, computed matrices that differ from a fresh
        computation, and image features of older weights that remain in the cache.
        """
        recorded = self.recorded
        live = live_tensors(self._model)
        digests, problems = self._digest_copies(live)
        problems += forget_images(self._model)
        derived = (
            ("kv_b_proj.weight", absorbed_matrices(self._model)),
            ("weight", kept_copies(self._model)),
        )
        with torch.no_grad():
            problems += [
                f"parameter {fill.parameter}: elements that the loader sets to "
                f"{fill.value} hold something else"
                for fill in recorded.recording.fills
                if (fill.view(live) != fill.value).any()
            ]
            problems += [
                f"{name}: not what the live {source} gives"
                for source, tensors in derived
                for name, tensor, expected in tensors
                if (tensor != expected).any()
            ]
        problems += [
            f"parameter {name}: not what the loader has computed of the weights that it was sent last"
            for name, digest in _digests_of(recorded.computed, live).items()
            if digest != recorded.computed[name]
        ]
        inputs = np.array(recorded.arrived or [0] * len(recorded.inputs), dtype="<i8")
        data = base64.b64encode(np.concatenate([digests, inputs]))
        return {"digests": data.decode(), "problems": problems}

    def leave(self) -> dict:
        """Forgets the trainers, whatever they do."""
        link = self.link
        self.link = None
        if link is not None and link.group is not None:
            link.group.abort()
        return {}

    def _take(self, request: ReceiveRequest, store: Mailbox, live: dict[str, Tensor]) -> int:
        """Receives all slices once, after joining the trainers if the link is new. Returns the peak
        of staged bytes."""
        deadline = Deadline(request["left_s"])
        if self.link is None or self.link.name != request["group"]:
            self.link = self._join(request, store)
        model = self._model
        recorded = self.recorded
        device = next(model.parameters()).device
        delta = request.get("delta", False)
        inputs = recorded.last or {
            copy.parameter: torch.empty(copy.size, dtype=recorded.specs[copy.hf][1], device=device)
            for copy in recorded.inputs
        }
        recorded.last = inputs if delta else {}
        staging_bytes = 0
        targets = live | inputs
        if self.link.group is None:
            take_batches(store, request["memory"], self.link.batches, targets, device, deadline)
        else:
            traffic = receive_batches(self.link.group, self.link.batches, targets, deadline, delta)
            staging_bytes = traffic.staging_bytes
        if inputs:  # these go through the model's own loader
            recorded.arrived = [
                int(slice_digest(inputs[copy.parameter], copy.box)) for copy in recorded.inputs
            ]
            model.load_weights([(copy.hf, inputs[copy.parameter]) for copy in recorded.inputs])  # type: ignore[operator]
            recorded.computed = _digests_of(recorded.recording.computed, live_tensors(model))
        return staging_bytes + sum(tensor.nbytes for tensor in inputs.values())

    def _join(self, request: ReceiveRequest, store: Mailbox) -> _Link:
        """Replaces the link of earlier trainers. Reads the batches of the new link, and joins the
        group if there is one."""
        self.leave()
        batches = decode_batches(store.get(request["plan"]))
        name = request["group"]
        if "memory" in request:
            return _Link(name, None, batches)
        device = next(self._model.parameters()).device
        trainers = request["size"] - request["num_ranks"]
        store.set(f"{name}/ready/{request['rank'] - trainers}")
        plain = store.plain
        address = route_address(plain.host, plain.port)
        limits = GroupLimits(request["join_s"], request["max_ctas"])
        group = join_group(plain, name, request["rank"], request["size"], device, address, limits)
        group.set_timeout(request["left_s"])
        return _Link(name, group, batches)

    def _digest_copies(self, live: dict[str, Tensor]) -> tuple[np.ndarray, list[str]]:
        """Returns the recorded copies' digests, int64 [copies], and a line for each copy with values
        that the published dtype cannot represent."""
        copies = self.recorded.recording.copies
        batches = self.recorded.batches
        inexact: dict[int, torch.dtype] = {}  # by copy
        with torch.no_grad():
            digests = batches.digests(live).cpu().numpy()
            for _, values, indices, dtype, _ in batches.views(live):
                if values.dtype != dtype:
                    wrong = (values.to(dtype).to(values.dtype) != values).unsqueeze(-1)
                    wrong = wrong.flatten(1).any(1).cpu()
                    inexact |= dict.fromkeys(indices[wrong.numpy()].tolist(), dtype)
        return digests, [
            f"parameter {copies[k].parameter}, HF tensor {copies[k].source}: holds values that "
            f"{dtype} cannot represent"
            for k, dtype in sorted(inexact.items())
        ]


class WithDraft(torch.nn.Module):
    """A model and its draft as one module. Shared tensors, such as the embedding, are the model's."""

    def __init__(self, model: torch.nn.Module, draft: torch.nn.Module):
        super().__init__()
        self.model = model
        self.draft = draft
        self._computing = [part for part in (model, draft) if hasattr(part, "post_load_weights")]
        if self._computing:
            self.post_load_weights = self._post_load_weights

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        """Loads HF tensors by both models' own loaders, each of which skips the other's tensors."""
        for part in self.children():
            part.load_weights(weights)  # type: ignore[operator]  # torch takes it for a Tensor or a Module

    def _post_load_weights(self) -> None:
        for part in self._computing:
            part.post_load_weights()  # type: ignore[operator]  # as above


def engine_end(model: torch.nn.Module, draft: torch.nn.Module | None = None) -> EngineEnd:
    """Returns the one EngineEnd of a model and its draft."""
    if model not in _ends:
        _ends[model] = EngineEnd(model, draft)
        compute_in_place(model)
        if draft is not None:
            # of SGLang's drafts GLM-4.7-Flash's does not say itself that it is one
            compute_in_place(draft, is_nextn=True)
    return _ends[model]


def record_engine_model(
    model: torch.nn.Module, specs: Specs, allow_computed: bool
) -> tuple[Recording, list[Copy]]:
    """Records one of SGLang's models. Also returns copies of the HF tensors from which it computes
    parameters."""

    def load(hf: Mapping[str, Tensor]) -> None:
        model.load_weights(list(hf.items()))  # type: ignore[operator]  # torch takes it for a Tensor or a Module

    # some loaders copy in worker threads, which a dispatch mode does not see
    with _threads_run_inline():
        recording = record(load, specs, live_tensors(model), allow_computed)
    recording.fills += cache_scales(model)
    names = sorted(set().union(*(computed.hf for computed in recording.computed.values())))
    shapes = [specs[name][0] for name in names]
    return recording, [  # into this loader's buffers, under names that no parameter has
        Copy(name, (0,) * len(shape), shape, f"HF tensor {name}", 0, row_major(shape))
        for name, shape in zip(names, shapes, strict=True)
    ]


def forget_images(model: torch.nn.Module) -> list[str]:
    """Empties this rank's cache of image features. Returns a line if the cache is not empty then.

    SGLang caches the tower's features by image hash, across updates of weights and flushes.
    """
    if not hasattr(model, "visual"):
        return []
    from sglang.srt.managers import mm_schedule

    cache = mm_schedule.embedding_cache
    if cache is None:
        return []
    cache.clear()
    if left := len(cache.mm_cache):
        return [
            f"{left} features of images that older weights computed are still in the engine's cache"
        ]
    return []


def _digests_of(names: Iterable[str], live: dict[str, Tensor]) -> dict[str, int]:
    """Returns the digests of these parameters."""
    tensors = {name: live[name].detach() for name in names}
    return {
        name: int(slice_digest(t, Box((0,) * t.dim(), tuple(t.shape))))
        for name, t in tensors.items()
    }


@contextmanager
def _threads_run_inline() -> Iterator[None]:
    """Makes every thread pool of this process run work at once, in the submitting thread."""

    def submit(self, function, /, *args, **kwargs):
        future: Future = Future()
        future.set_result(function(*args, **kwargs))
        return future

    with _PATCHING, ExitStack() as stack:  # the patch affects the whole process
        stack.callback(setattr, ThreadPoolExecutor, "submit", ThreadPoolExecutor.submit)
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]  # loaders have imported the class by its name
        yield
