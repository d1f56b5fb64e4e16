"""Computes what one trainer rank holds beside activations: weights, gradients, optimiser state. Loads no torch.

Gradients are float32; Adam's two moments too, and a copy of weights that are narrower. Where adapters are trained, they
alone have gradients and state. tests/dist/test_actor_lora.py compares these figures with the buffers of real actors.
"""

from dataclasses import dataclass

from megagrpo.config.actor import ActorConfig
from megagrpo.families.architecture import Architecture
from megagrpo.families.table import model_tensors
from megagrpo.families.tensors import TensorSpec, adapter_tensors

_GRADIENT_WIDTH = 4
_ROW_PARALLEL = ("o_proj", "down_proj")  # cut along the inputs: their A is, and B is whole; of the others it is B


@dataclass(frozen=True)
class TrainerMemory:
    """Holds bytes of one rank, pipeline stages being taken as equal."""

    weights: float
    gradients: float
    optimiser: float
    trained: int  # elements of the whole model that have gradients


def trainer_memory(arch: Architecture, actor: ActorConfig) -> TrainerMemory:
    """Returns what a rank holds of the model of `arch`, or of it and its adapters."""
    width = 2 if actor.dtype == "bfloat16" else 4
    model = list(model_tensors(arch))
    trained = model
    if actor.lora is not None:
        trained = list(adapter_tensors(model, actor.lora.targets, actor.lora.rank))
    held = {spec.name: _held(spec, actor) for spec in [*model, *trained]}
    p, gradients, optimiser = actor.parallel, 0.0, 0.0
    for spec in trained:
        copies = actor.world_size // (p.etp * p.ep * p.pp if spec.expert else p.tp * p.pp)
        gradients += held[spec.name] * _GRADIENT_WIDTH
        optimiser += held[spec.name] * (12 if width == 2 else 8) / (copies if actor.optimizer.distributed else 1)
    weights = sum(held.values()) * width
    return TrainerMemory(weights, gradients, optimiser, sum(spec.size for spec in trained))


def _held(spec: TensorSpec, actor: ActorConfig) -> float:
    """Returns how many elements of a tensor a rank holds, on average over stages and experts."""
    p = actor.parallel
    cut = p.etp if spec.expert else p.tp
    *_, projection, half, _ = ["", "", *spec.name.split(".")]
    if half in ("lora_A", "lora_B") and (half == "lora_A") != (projection in _ROW_PARALLEL):
        cut = 1
    return spec.size / (cut * p.pp * (p.ep if spec.expert else 1))
