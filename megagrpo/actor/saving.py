"""Saves and loads the actor's part of a checkpoint: model and optimiser by Megatron, and every rank's RNG states."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue, SimpleQueue

import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from megagrpo.actor.megatron_actor import MegatronActor

# every parameter's optimiser state in the parameter's own shape: resumes under any other layout
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,  # gathered by one rank of each replica group, not by all
    "chained_optim_avoid_prefix": True,
}
_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True)
class ActorSave:
    """Writes this rank's part of a checkpoint; see checkpoint.SavePlan."""

    request: AsyncRequest
    buckets: list  # Megatron's, one a file

    def write(self) -> list[Path]:
        """Runs Megatron's writer in this thread: in a process that it forks, as Megatron would, it could deadlock."""
        if not self.buckets:
            return []
        transforms, results = self.request.async_fn.args[0], {}
        for index, bucket in enumerate(self.buckets):
            outcome: SimpleQueue = SimpleQueue()
            turns: Queue = Queue()
            turns.put(index)
            filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                transforms, index, bucket, outcome, turns, use_fsync=True
            )
            _, results[index] = outcome.get()
            if isinstance(results[index], Exception):
                raise _root(results[index])
        self.request.async_fn_args[2].put(results)  # where `finish` looks for them
        return [Path(path) for path, _, _ in self.buckets]

    def finish(self) -> None:
        """Collective. Writes the index of all ranks' files. Raises OSError."""
        with _failure_as_os_error():
            for collective in self.request.finalize_fns:
                collective()


def save_actor(actor: MegatronActor, folder: Path, snapshot: bool = False) -> ActorSave:
    """Collective. Plans a checkpoint in an existing empty folder. Raises OSError when it cannot be planned.

    With `snapshot` the state is copied to host memory now, so that training may go on meanwhile.
    """
    state = _sharded_state(actor, actor.updates_done, is_loading=False)
    # Megatron's forked writers hand over results through a manager process, a thread does through a queue: a new one,
    # because `finish` never reads what a rank has written of a save that failed on another rank.
    filesystem_async._results_queue = Queue()
    with _failure_as_os_error():
        request = dist_checkpointing.save(state, str(folder), content_metadata=_METADATA, async_sharded_save=True)
    # on the host; for a model on a CPU these are the live tensors
    buckets = request.preload_fn() if request.preload_fn else []
    if snapshot and actor.mesh.device.type == "cpu":
        buckets = [
            (path, name, (blobs, [(item, t.clone()) for item, t in tensors]))
            for path, name, (blobs, tensors) in buckets
        ]
    return ActorSave(request, buckets)


@contextmanager
def _failure_as_os_error() -> Iterator[None]:
    """Raises OSError for a failed save: CheckpointException is no Exception and would pass most handlers."""
    try:
        yield
    except CheckpointException as exc:
        raise OSError(_first_failure(exc)) from exc


def _root(exc: BaseException) -> BaseException:
    """Returns what happened first: a full disk, not what torch's archive says about it while it is closed."""
    while exc.__context__ is not None:
        exc = exc.__context__
    return exc


def load_actor(actor: MegatronActor, folder: Path) -> None:
    """Collective. Reads a state written by `save_actor`. Raises ValueError when the files do not fit the model."""
    try:
        common = dist_checkpointing.load_common_state_dict(str(folder))
        updates_done = common["updates_done"]
        if updates_done:
            _allocate_optimizer_state(actor)
        wanted = _sharded_state(actor, updates_done, is_loading=True)
        if common["layout"] != wanted["layout"]:
            del wanted["rng"]
        state = dist_checkpointing.load(wanted, str(folder))
    except CheckpointException as exc:
        raise ValueError(f"checkpoint {folder} does not fit this model and layout: {_first_failure(exc)}") from exc
    except (dist_checkpointing.core.CheckpointingException, OSError, RuntimeError, KeyError) as exc:
        raise ValueError(
            f"checkpoint {folder} does not fit this model and layout: {type(exc).__name__}: {exc}"
        ) from exc
    for index, chunk in enumerate(actor.chunks):
        chunk.load_state_dict(state[f"model{index}"])
    if updates_done:
        _load_optimizer_state(actor, state["optimizer"])
    else:
        actor.weights_loaded()
    actor.updates_done = updates_done
    if "rng" in state:
        rng = state["rng"]
        torch.set_rng_state(rng["torch"])
        tensor_parallel.get_cuda_rng_tracker().set_states(rng["tensor_parallel"])


def _parts(actor: MegatronActor) -> list[MegatronOptimizer]:
    """Returns the optimisers of dense and expert parameters, where there are both."""
    chained = isinstance(actor.optimizer, ChainedOptimizer)
    return actor.optimizer.chained_optimizers if chained else [actor.optimizer]


def _allocate_optimizer_state(actor: MegatronActor) -> None:
    """Gives a distributed optimizer its state, which Megatron asserts before it says what it wants loaded."""
    for part in _parts(actor):
        if isinstance(part, DistributedOptimizer) and not part.optimizer.state:
            # steps with zero gradients; everything it writes is loaded next
            part._init_optimizer_states_with_dummy_values()


def _load_optimizer_state(actor: MegatronActor, state: dict) -> None:
    """Loads as Megatron does, around its two slips with torch's Adam (Apex's keeps no step count beside a parameter).

    Reading reshardable parameter state it looks for a step count that is saved elsewhere; and the count that it
    restores is one tensor shared by all parameters, which torch then increases once for each of them.
    """
    parts = _parts(actor)
    if not isinstance(parts[0], DistributedOptimizer):
        actor.optimizer.load_state_dict(state)
        return
    for part, own in zip(parts, [state] if len(parts) == 1 else [state[i] for i in range(len(parts))], strict=True):
        part.load_state_dict({key: value for key, value in own.items() if key != "param_state"})
        inner = part.optimizer.state
        steps = {parameter: values.pop("step") for parameter, values in inner.items() if "step" in values}
        part.load_parameter_state_from_fully_reshardable(own["param_state"])
        for parameter, step in steps.items():
            inner[parameter]["step"] = step.clone()


def _first_failure(exc: CheckpointException) -> str:
    if not exc.failures:  # they are told to the coordinator alone
        return "another rank failed"
    rank, (cause, _) = min(exc.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {str(cause)[:_MESSAGE_CHARACTERS]}"


def _sharded_state(actor: MegatronActor, updates_done: int, is_loading: bool) -> dict:
    model = {f"model{i}": chunk.sharded_state_dict(prefix="") for i, chunk in enumerate(actor.chunks)}
    # one flat view for the optimiser, which looks parameters up across chunks
    merged = {f"{part}.{name}": value for part, tensors in model.items() for name, value in tensors.items()}
    layout = {"ranks": actor.mesh.world_size, **actor.config.parallel.model_dump()}
    state = {**model, "updates_done": updates_done, "layout": layout, "rng": _rng_state(actor)}
    if updates_done:  # before the first update the optimiser has no state, and Megatron would ask for one when loading
        state["optimizer"] = actor.optimizer.sharded_state_dict(merged, is_loading=is_loading, metadata=_METADATA)
    return state


def _rng_state(actor: MegatronActor) -> ShardedObject:
    """Returns this rank's RNG states, which belong to a rank, not to a tensor: restored under the same layout only."""
    states = {"torch": torch.get_rng_state(), "tensor_parallel": tensor_parallel.get_cuda_rng_tracker().get_states()}
    mesh = actor.mesh
    return ShardedObject("rng", states, (mesh.world_size,), (mesh.rank,), replica_id=0)
