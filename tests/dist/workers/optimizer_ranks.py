"""One rank that trains, saves and resumes with a kind of optimizer; Transformer Engine's stand-in is on the path."""

from pathlib import Path
from unittest.mock import patch

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.saving import load_actor, save_actor
from megagrpo.config.schema import ActorConfig, OptimizerConfig
from megagrpo.models import internals_0_19
from megagrpo.weights.actor_weights import load_initial_weights
from tests.dist.workers import harness
from tests.dist.workers.actor_ranks import RICH, batch_of, gradient

_DIVIDE = HybridDeviceOptimizer._get_sub_optimizer_param_groups
_LOAD_IN_PLACE = internals_0_19.load_in_place


class OnGpu(TorchFunctionMode):
    """Says of tensors that they are on a GPU, but for copies that were asked for on the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cuda.__get__:
            return not getattr(args[0], "on_host", False)
        if func is torch.Tensor.pin_memory:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.cpu:
            out = out.clone()
            out.on_host = True
        elif func in (torch.Tensor.float, torch.Tensor.detach, torch.Tensor.clone):
            out.on_host = getattr(args[0], "on_host", False)
        return out


def divide_as_on_gpu(self: HybridDeviceOptimizer, fraction: float):
    """Divides parameters between GPU and host as where there is a GPU."""
    with OnGpu():
        return _DIVIDE(self, fraction)


def one_update(actor: MegatronActor, shift: int) -> list[float]:
    loss = gradient(actor, batch_of(actor.mesh, shift=shift), RICH)
    return [loss, actor.optimizer_step(loss)["optim/grad_norm"]]


def measure(actor: MegatronActor, job: dict) -> dict:
    """Two updates, a checkpoint and one update more; or that one, from the checkpoint of another job, if it loads."""
    load_initial_weights(actor, job["model"])
    checkpoint = Path(job["checkpoint"])
    allocated: list[Tensor] = []
    if job["load"]:

        def note(part: DistributedOptimizer) -> None:
            allocated.extend(states(part))
            _LOAD_IN_PLACE(part)

        try:
            with patch.object(internals_0_19, "load_in_place", note):
                load_actor(actor, checkpoint)
        except ValueError as exc:
            return {"refused": str(exc)}
    else:
        for number in range(2):
            one_update(actor, number)
        checkpoint.mkdir()
        plan = save_actor(actor, checkpoint, job["reshardable"])
        plan.write()
        plan.finish()
    parts = actor.optimizer.chained_optimizers
    in_place = {id(tensor) for part in parts for tensor in states(part)} == set(map(id, allocated))
    kinds = sorted({type(part.optimizer).__name__ for part in parts})
    then = one_update(actor, 5)
    weights, kept = ({key: p.detach().clone() for key, p in actor.parameters().items()}, Path(job["weights"]))
    if not job["load"]:
        torch.save(weights, kept)
    same = all(torch.equal(weights[key], tensor) for key, tensor in torch.load(kept, map_location="cpu").items())
    return {
        "kinds": kinds,
        "then": then,
        "same": same,
        "in place": in_place,
        "adam": sorted(map(list, {adam for part in parts for adam in settings_used(part)})),
    }


def settings_used(part: DistributedOptimizer) -> list[tuple[float, float, float]]:
    """beta 1, beta 2 and eps with which an optimizer has stepped, and those inside it."""
    every = [part.optimizer, *getattr(part.optimizer, "sub_optimizers", [])]
    return [(*g["betas"], g["eps"]) for one in every for g in one.param_groups]


def states(part: DistributedOptimizer) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    return [value for values in part.optimizer.state.values() for value in values.values()]


def settings(job: dict) -> tuple[ActorConfig, OptimizerConfig]:
    """Weights that move far: the update counts, not the rounding."""
    adam = job.get("adam", {})
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=0.1, megatron=job.get("optimizer", {}), **adam)
    return harness.settings(job)[0], optimizer


def main(folder: Path) -> None:
    with patch.object(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", divide_as_on_gpu):
        harness.with_actors(folder, measure, settings)
