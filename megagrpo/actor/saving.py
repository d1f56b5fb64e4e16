"""The actor's part of a checkpoint: Megatron's dist_checkpointing of model and optimiser, plus the RNG states of every rank."""

from pathlib import Path

import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megagrpo.actor.megatron_actor import MegatronActor

# every parameter's optimiser state in the parameter's own shape: resumes under any other layout
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save_actor(actor: MegatronActor, folder: Path) -> None:
    """Collective. Write the actor's state into an existing empty folder."""
    dist_checkpointing.save(_sharded_state(actor, is_loading=False), str(folder), content_metadata=_METADATA)


def load_actor(actor: MegatronActor, folder: Path) -> None:
    """Collective. Read a state written by `save_actor`; ValueError when the files do not fit the model."""
    _allocate_optimizer_state(actor)
    wanted = _sharded_state(actor, is_loading=True)
    try:
        state = dist_checkpointing.load(wanted, str(folder))
    except (dist_checkpointing.core.CheckpointingException, OSError, RuntimeError, KeyError) as exc:
        raise ValueError(f"checkpoint {folder} does not fit this model and layout: {type(exc).__name__}: {exc}") from exc
    for index, chunk in enumerate(actor.chunks):
        chunk.load_state_dict(state[f"model{index}"])
    parts = actor.optimizer.chained_optimizers
    for index, part in enumerate(parts):  # Megatron leaves out the index where there is one part only
        _load_optimizer(part, state["optimizer"] if len(parts) == 1 else state["optimizer"][index])
    actor.updates_done = state["updates_done"]
    rng = state["rng"]
    if rng is not None:
        torch.set_rng_state(rng["torch"])
        tensor_parallel.get_cuda_rng_tracker().set_states(rng["tensor_parallel"])


def _allocate_optimizer_state(actor: MegatronActor) -> None:
    """Adam's moments exist after a first step only, and the distributed optimiser cannot describe what it lacks.

    Megatron's own step over zero gradients makes them; what it does to the weights is overwritten by the checkpoint's.
    """
    for part in actor.optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer) and not part.optimizer.state:
            part._init_optimizer_states_with_dummy_values()


def _load_optimizer(part: MegatronOptimizer, state: dict) -> None:
    if not isinstance(part, DistributedOptimizer):
        part.load_state_dict(state)
        return
    part.load_state_dict({key: value for key, value in state.items() if key != "param_state"})
    # torch's Adam counts steps per parameter, Transformer Engine's does not. Megatron's reader of moments fails on the count, and
    # what it has just loaded is one tensor that all parameters share, which would then count every parameter's step.
    steps = {parameter: values.pop("step") for parameter, values in part.optimizer.state.items() if "step" in values}
    part.load_parameter_state_from_fully_reshardable(state["param_state"])
    for parameter, step in steps.items():
        part.optimizer.state[parameter]["step"] = step.clone()


def _sharded_state(actor: MegatronActor, is_loading: bool) -> dict:
    model = {f"model{i}": chunk.sharded_state_dict(prefix="") for i, chunk in enumerate(actor.chunks)}
    # one flat view for the optimiser, which looks parameters up across chunks
    merged = {f"{part}.{name}": value for part, tensors in model.items() for name, value in tensors.items()}
    state = {
        **model,
        "optimizer": actor.optimizer.sharded_state_dict(merged, is_loading=is_loading, metadata=_METADATA),
        "updates_done": actor.updates_done,
        "rng": _rng_state(actor),
    }
    return state


def _rng_state(actor: MegatronActor) -> ShardedObject:
    """RNG states belong to a rank, not to a tensor: restored only where the same layout asks for them."""
    states = {"torch": torch.get_rng_state(), "tensor_parallel": tensor_parallel.get_cuda_rng_tracker().get_states()}
    mesh = actor.mesh
    return ShardedObject("rng", states, (mesh.world_size,), (mesh.rank,), replica_id=0)
