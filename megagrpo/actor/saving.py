"""Saves and loads the actor's part of a checkpoint: model and optimizer by Megatron, and each
rank's RNG states.

Two forms of the distributed optimizer's state, which every checkpoint names in its own metadata:

    dp_reshardable      every rank writes and reads the pieces that it holds, without messages; same
    layout only
    fully_reshardable   gathered to one rank of each data-parallel group, in the parameters' own
    shapes; any layout

What data-parallel ranks have in common is divided among them: each writes, and reads, its share
once.
"""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedWriter, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.optimizer import optimizer_tensors
from megagrpo.models import internals_0_19
from megagrpo.models.body import Body
from megagrpo.models.layers.lora import sharded_adapters

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FORM = "distrib_optim_sharding_type"
_OWN_PARTS, _RESHARDABLE = "dp_reshardable", "fully_reshardable"
_MESSAGE_CHARACTERS = 300
_OTHER_BUCKETS = (
    ". Own parts are cut by actor.ddp (bucket_size, overlap_grad_reduce) and main_grads_dtype of "
    "actor.optimizer.megatron. If one has changed, put it back once and ask the run to stop (SIGUSR1 to the "
    "launcher), with checkpoint.reshardable last or always"
)
_KIND = "kind_of_optimizer"
_KIND_FIELDS = (
    "use_precision_aware_optimizer",
    "store_param_remainders",
    "main_params_dtype",
    "optimizer_cpu_offload",
)


def _kind_of_optimizer(actor: MegatronActor) -> dict[str, str]:
    """Returns the settings that determine the form of the optimizer's state; empty for Megatron's
    defaults."""
    config = actor.optimizer.chained_optimizers[0].config
    if not config.use_precision_aware_optimizer:
        return {}
    return {name: str(getattr(config, name)) for name in _KIND_FIELDS}


def _check_kind_of_optimizer(actor: MegatronActor, metadata: dict, folder: Path) -> None:
    """Raises ValueError when the state was saved by an optimizer of another kind, or holds experts
    in another order: Transformer Engine's are grouped."""
    grouped = actor.transformer.moe_grouped_gemm
    if metadata[_FORM] == _OWN_PARTS and metadata.get("grouped_experts", grouped) != grouped:
        raise ValueError(
            f"checkpoint {folder} was written with actor.transformer_engine {not grouped}, here it is "
            f"{grouped}, which orders experts otherwise. Put it back once and ask the run to stop "
            "(SIGUSR1 to the launcher), with checkpoint.reshardable last or always: it then saves "
            "in the form that both load"
        )
    saved = metadata.get(_KIND, {})
    here = _kind_of_optimizer(actor)
    if saved != here:
        text = "; ".join(
            f"{name} {saved.get(name, 'not set')}, here {here.get(name, 'not set')}"
            for name in _KIND_FIELDS
            if saved.get(name) != here.get(name)
        )
        raise ValueError(
            f"checkpoint {folder} was written with other settings in "
            f"actor.optimizer.megatron: {text}"
        )


class _Checksummed(RawIOBase):
    """Writes a file from its start to its end, as torch.save does, and knows the CRC-32 of its
    content."""

    def __init__(self, file: BufferedWriter):
        super().__init__()
        self._file = file
        self.size = 0
        self.crc = 0

    def write(self, data: "Buffer") -> int:
        """Writes any buffer; returns its bytes."""
        block = memoryview(data).cast("B")
        self._file.write(block)
        self.crc = zlib.crc32(block, self.crc)
        self.size += len(block)
        return len(block)

    def tell(self) -> int:
        """Returns the bytes written."""
        return self.size

    def flush(self) -> None:
        """Does nothing: torch flushes after every tensor."""


@dataclass(frozen=True)
class ActorSave:
    """Writes this rank's part of a checkpoint. Both methods may raise OSError.

    reshardable: whether another layout will be able to load it; the same on every rank.
    """

    request: AsyncRequest
    buckets: list  # Megatron's, one a file
    reshardable: bool

    def write(self) -> dict[Path, tuple[int, int]]:
        """Writes this rank's files, perhaps in a thread, without collectives; returns their sizes
        and checksums.

        As Megatron's writer does, in this thread: in processes that it forks it could deadlock. The
        checksums are of the bytes on their way to the files, which are not read again.
        """
        if not self.buckets:
            return {}
        written = {}
        results = {}
        for index, (path, key, (blobs, tensors)) in enumerate(self.buckets):
            try:
                with open(path, "wb") as file:
                    stream = _Checksummed(file)
                    results[index] = internals_0_19.write_items(
                        self.request, stream, key, [*blobs, *tensors]
                    )
                    file.flush()
                    os.fsync(file.fileno())
            except (OSError, RuntimeError) as exc:  # torch wraps the first in the second
                # the full disk, not torch's error while closing its archive
                first: BaseException = exc
                while first.__context__ is not None:
                    first = first.__context__
                raise first from None
            written[Path(path)] = stream.size, stream.crc
        internals_0_19.put_results(self.request, results)
        return written

    def finish(self) -> None:
        """Collective. Called after `write` has returned on every rank: writes the index of all
        files."""
        with _failure_as_os_error():
            for collective in self.request.finalize_fns:
                collective()


def save_actor(
    actor: MegatronActor, folder: Path, reshardable: bool, snapshot: bool = False
) -> ActorSave:
    """Collective. Plans a checkpoint in an existing empty folder. Raises OSError when it cannot be
    planned.

    With `reshardable` any layout can load it; what is not divided over data-parallel ranks always
    is reshardable. With `snapshot` the state is copied to host memory now, so that training may go
    on meanwhile.
    """
    divided = actor.updates_done > 0 and isinstance(
        actor.optimizer.chained_optimizers[0], DistributedOptimizer
    )
    metadata = {
        _KIND: _kind_of_optimizer(actor),
        "grouped_experts": actor.transformer.moe_grouped_gemm,
        _FORM: _OWN_PARTS if divided and not reshardable else _RESHARDABLE,
        # gathered by one rank of each replica group, not by all
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "chained_optim_avoid_prefix": True,
    }
    internals_0_19.expect_results_of_threads()
    with actor.update_state.readable():
        state = _sharded_state(actor, actor.updates_done, metadata, is_loading=False)
        with _failure_as_os_error():
            request = dist_checkpointing.save(
                state,
                str(folder),
                FullyParallelSaveStrategyWrapper(
                    get_default_save_sharded_strategy(),
                    # the ranks that hold the same slices of the dense model
                    mpu.get_data_parallel_group(with_context_parallel=True),
                ),
                async_sharded_save=True,
                async_strategy="mcore",  # by this process: the other needs NVIDIA's resiliency package
                content_metadata=metadata,
            )
        # on the host: copies of GPU tensors, and tensors that lie there already, except for views
        # that Megatron had to copy
        buckets = internals_0_19.preloaded(request) if request.preload_fn else []
        live = set[int]()
        if snapshot:
            live.update(map(_memory, optimizer_tensors(actor.optimizer)))
            for chunk in actor.chunks:
                live.update(map(_memory, (*chunk.parameters(), *chunk.buffers())))

        def kept(tensor: Tensor) -> Tensor:
            """Returns a tensor of its own, which stays what it is when a step changes the actor's
            or the optimizer's are moved."""
            return tensor.clone() if _memory(tensor) in live else tensor.detach()

        buckets = [
            (path, name, (blobs, [(item, kept(tensor)) for item, tensor in tensors]))
            for path, name, (blobs, tensors) in buckets
        ]
    return ActorSave(request, buckets, metadata[_FORM] == _RESHARDABLE)


def _memory(tensor: Tensor) -> int:
    """Returns the identity of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


@contextmanager
def _failure_as_os_error() -> Iterator[None]:
    """Raises OSError for a failed save, when no rank waits for this one: CheckpointException is not
    an Exception, most handlers would miss it."""
    try:
        with internals_0_19.main_rank_fails_last():
            yield
    except CheckpointException as exc:
        raise OSError(_first_failure(exc)) from exc


def load_actor(actor: MegatronActor, folder: Path, with_optimizer: bool = True) -> None:
    """Collective. Reads a state written by `save_actor`. Raises ValueError when the files do not
    fit the model. with_optimizer: else the weights only, as of an actor without updates."""
    try:
        common = dist_checkpointing.load_common_state_dict(str(folder))
        updates_done = common["updates_done"] if with_optimizer else 0
        metadata = common["content_metadata"]
        if updates_done:
            _check_kind_of_optimizer(actor, metadata, folder)
            for part in actor.optimizer.chained_optimizers:
                if isinstance(part, DistributedOptimizer):
                    if not part.optimizer.state:
                        internals_0_19.allocate_state(part)
                    internals_0_19.load_in_place(part)
        wanted = _sharded_state(actor, updates_done, metadata, is_loading=True)
        if common["layout"] != wanted["layout"]:
            del wanted["rng"]
        strategy = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(str(folder)),
            mpu.get_data_parallel_group(with_context_parallel=True),
        )
        state = dist_checkpointing.load(wanted, str(folder), strategy)
    except (
        CheckpointException,
        dist_checkpointing.core.CheckpointingException,
        OSError,
        RuntimeError,
        KeyError,
    ) as exc:
        raise ValueError(
            f"checkpoint {folder} does not fit this model and layout: {_first_failure(exc)}"
        ) from exc
    for index, chunk in enumerate(actor.chunks):
        _load_chunk(actor, chunk, state[f"model{index}"])
    if updates_done:
        _load_optimizer_state(actor, state["optimizer"], metadata[_FORM])
        # the state brought its own; every step sets learning rate and weight decay
        for part in actor.optimizer.chained_optimizers:
            for group in part.param_groups:
                group["betas"] = (part.config.adam_beta1, part.config.adam_beta2)
                group["eps"] = part.config.adam_eps
    else:
        actor.weights_loaded()
    actor.updates_done = updates_done
    if "rng" in state:
        rng = state["rng"]
        torch.set_rng_state(rng["torch"])
        tensor_parallel.get_cuda_rng_tracker().set_states(rng["tensor_parallel"])


def _load_chunk(actor: MegatronActor, chunk: Body, state: dict) -> None:
    """Loads tensors; raises ValueError when one is missing or unknown.

    Of Transformer Engine's modules some have an `_extra_state` beside their tensors (scales of
    fp8), which Megatron saves of some only. With adapters only they are saved.
    """
    wrong = chunk.load_state_dict(state, strict=False)
    missing = [] if actor.config.lora is not None else wrong.missing_keys
    names = [
        name for name in [*missing, *wrong.unexpected_keys] if not name.endswith("._extra_state")
    ]
    if names:
        raise ValueError(
            f"the checkpoint does not fit the model: {', '.join(names[:5])} missing or unknown"
        )


@torch.no_grad()
def _load_optimizer_state(actor: MegatronActor, state: dict, form: str) -> None:
    """Loads as Megatron does, around two slips with torch's Adam (Apex's keeps no step count beside
    a parameter).

    Reading parameter state it looks for a step count that is saved elsewhere, or takes the present
    one; and the count that it restores is one tensor shared by all parameters, which torch then
    increases once for each of them.
    """
    # of dense and expert parameters, where there are both
    parts = actor.optimizer.chained_optimizers
    states = [state] if len(parts) == 1 else [state[i] for i in range(len(parts))]
    for part, own in zip(parts, states, strict=True):
        for group in own.get("optimizer", own).get("param_groups", ()):
            # Megatron also tells groups apart by these, which the experiment may have changed
            group |= {"max_lr": part.config.lr, "min_lr": part.config.min_lr}
    if not isinstance(parts[0], DistributedOptimizer):
        actor.optimizer.load_state_dict(state)
        return
    for part, own in zip(parts, states, strict=True):
        part.load_state_dict({key: value for key, value in own.items() if key != "param_state"})
        inner = part.optimizer.state
        steps = {
            parameter: values.pop("step") for parameter, values in inner.items() if "step" in values
        }
        if form == _OWN_PARTS:
            with internals_0_19.without_padding_mark(part):
                part.load_parameter_state_from_dp_reshardable(own["param_state"])
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                internals_0_19.sync_hybrid_state(part)
        else:
            part.load_parameter_state_from_fully_reshardable(own["param_state"])
        for parameter, step in steps.items():
            inner[parameter]["step"] = step.clone()


def _first_failure(exc: BaseException) -> str:
    if not isinstance(exc, CheckpointException):
        return (
            f"{type(exc).__name__}: {str(exc)[:_MESSAGE_CHARACTERS]}"
            f"{_OTHER_BUCKETS * ('.bucket_idx' in str(exc))}"
        )
    if not exc.failures:  # only the coordinator receives them
        return "another rank failed"
    rank, (cause, _) = min(exc.failures.items())
    return f"rank {rank}: {_first_failure(cause)}"


def _sharded_state(
    actor: MegatronActor, updates_done: int, metadata: dict, is_loading: bool
) -> dict:
    model = {
        f"model{i}": chunk.sharded_state_dict(prefix="")
        if actor.config.lora is None
        else sharded_adapters(chunk)
        for i, chunk in enumerate(actor.chunks)
    }
    # one flat view for the optimizer, which looks parameters up across chunks
    merged = {
        f"{part}.{name}": value
        for part, tensors in model.items()
        for name, value in tensors.items()
    }
    # RNG states belong to a rank, not to a tensor: restored under the same layout only
    states = {
        "torch": torch.get_rng_state(),
        "tensor_parallel": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    rng = ShardedObject("rng", states, (actor.mesh.world_size,), (actor.mesh.rank,), replica_id=0)
    state = {**model, "updates_done": updates_done, "layout": actor.config.layout, "rng": rng}
    # before the first update the optimizer has no state, and Megatron would ask for one when
    # loading
    if updates_done:
        state["optimizer"] = actor.optimizer.sharded_state_dict(
            merged, is_loading=is_loading, metadata=metadata
        )
        _forget_classes(state["optimizer"])
    return state


def _forget_classes(state: object) -> None:
    """Removes classes, which torch reads from no file: of its parts' optimizers the hybrid one
    keeps the class."""
    match state:
        case list():
            for value in state:
                _forget_classes(value)
        case dict():
            for name, value in list(state.items()):
                if isinstance(value, type):
                    del state[name]
                else:
                    _forget_classes(value)
