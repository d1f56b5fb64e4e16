"""Writes the actor's live weights as a Hugging Face folder, and adapters as PEFT's."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megagrpo.config.actor import LoraConfig
from megagrpo.mesh import Mesh
from megagrpo.models.table import begin_of_kept, read_description
from megagrpo.system.run_folder import whole_folder
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.hf_folder import HfFolder, write_hf_folder
from megagrpo.weights.transports.gather_plan import (
    gather_to_main,
    make_gather_plan,
    published_specs,
)

_SHARD_BYTES = 2 << 30
_ADAPTER_BYTES = 1 << 30
_PEFT_PREFIX = "base_model.model."  # of the model inside PEFT's two wrappers


def export_hf(
    target: str | Path,
    weights: ActorWeights,
    mesh: Mesh,
    like: str,
    dtype: str,
    tokenizer: str | None = None,
) -> None:
    """Collective. Writes the live weights, adapters merged, as an HF folder, complete or not at all.

    like: the folder that all other files come from, and the tensors that are not trained;
    tokenizer: another folder for the tokenizer's files. dtype: of all trained tensors without a
    fixed dtype (ActorWeights.fixed_dtypes). Raises LeaderError on every rank.
    """
    published: torch.dtype = getattr(torch, dtype)
    specs = published_specs(weights.hf_specs, published, weights.fixed_dtypes)
    plan = make_gather_plan(mesh.gather_world(weights.copies), specs, _SHARD_BYTES)

    def write(buckets: Iterator[dict[str, Tensor]]) -> None:
        shards = chain(buckets, [untrained_tensors(Path(like))])
        write_hf_folder(target, shards, like, published, tokenizer=tokenizer or like)

    with weights.merged():
        gather_to_main(plan, weights.parameters(), mesh, write, f"export to {target}")


def untrained_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors that are left out of training, but that an export's config.json
    describes."""
    begin = begin_of_kept(read_description(folder / "config.json"))
    if not begin:
        return {}
    hf = HfFolder(folder)
    return {name: hf[name] for name in hf if name.startswith(begin)}


def export_peft(
    target: Path, adapters: ActorWeights, mesh: Mesh, lora: LoraConfig, base: str, dtype: str
) -> None:
    """Collective. Writes the live adapters (MegatronActor.trained_weights) as PEFT's folder,
    complete or not at all.

    Replaces an older folder. base: the model's folder. Raises LeaderError on every rank.
    """
    stored: torch.dtype = getattr(torch, dtype)
    specs = published_specs(adapters.hf_specs, stored)
    plan = make_gather_plan(mesh.gather_world(adapters.copies), specs, _ADAPTER_BYTES)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        # experts one by one, as in the checkpoint; PEFT fuses them itself
        "target_modules": list(lora.targets),
        "bias": "none",
        "inference_mode": True,
    }

    def write(buckets: Iterator[dict[str, Tensor]]) -> None:
        tensors: dict[str, Tensor] = {}
        for bucket in buckets:
            tensors |= {
                f"{_PEFT_PREFIX}{name}": t.detach().to("cpu", copy=True)
                for name, t in bucket.items()
            }
        with whole_folder(target) as draft:
            save_file(tensors, draft / "adapter_model.safetensors", metadata={"format": "pt"})
            (draft / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")

    gather_to_main(plan, adapters.parameters(), mesh, write, f"export to {target}")
