"""Writes the actor's live adapters as PEFT's folder."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import Mesh
from megagrpo.models.folder import ADAPTERS
from megagrpo.system.run_folder import whole_folder
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.hf_folder import host_shards
from megagrpo.weights.transports.gather_plan import (
    gather_copies,
    gather_to_main,
    make_gather_plan,
    published_specs,
)

_PEFT_PREFIX = "base_model.model."  # of the model inside PEFT's two wrappers


def export_peft(target: Path, adapters: ActorWeights, mesh: Mesh, config: ExperimentConfig) -> None:
    """Collective. Writes the live adapters (MegatronActor.trained_weights) as PEFT's folder,
    complete or not at all.

    Replaces an older folder. Raises LeaderError on every rank.
    """
    lora = config.actor.lora
    assert lora is not None, "refuse_export refuses to begin"
    specs = published_specs(adapters.hf_specs, getattr(torch, config.actor.dtype))
    copies = gather_copies(adapters.copies, mesh)
    plan = make_gather_plan(copies, specs, config.weights.bucket_bytes)
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        # experts one by one, as in the checkpoint; PEFT fuses them itself
        "target_modules": list(lora.targets),
        "bias": "none",
        "inference_mode": True,
    }

    def write(buckets: Iterator[dict[str, Tensor]]) -> None:
        tensors = {
            f"{_PEFT_PREFIX}{name}": t
            for shard in host_shards(buckets)
            for name, t in shard.items()
        }
        with whole_folder(target) as draft:
            save_file(tensors, draft / "adapter_model.safetensors", metadata={"format": "pt"})
            (draft / ADAPTERS).write_text(json.dumps(description, indent=2) + "\n")

    gather_to_main(plan, adapters.parameters(), mesh, write, f"export to {target}")
