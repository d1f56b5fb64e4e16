"""Writes adapters as PEFT's own folder: adapter_config.json and adapter_model.safetensors."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megagrpo.config.actor import LoraConfig
from megagrpo.mesh import Mesh
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.transports.gather_plan import gather_to_main, make_gather_plan, published_specs

_BUCKET_BYTES = 1 << 30
_PREFIX = "base_model.model."  # of the model inside PEFT's two wrappers


@dataclass(frozen=True)
class PeftFolder:
    """Where adapters are written to, and what PEFT is told about them. base: the model's folder."""

    target: Path
    lora: LoraConfig
    base: str

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes the folder, whole or not at all; one that is there already is replaced."""
        partial = self.target.with_name(f".{self.target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            save_file(dict(tensors), partial / "adapter_model.safetensors", metadata={"format": "pt"})
            (partial / "adapter_config.json").write_text(json.dumps(self._config(), indent=2) + "\n")
            shutil.rmtree(self.target, ignore_errors=True)
            partial.rename(self.target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _config(self) -> dict[str, Any]:
        """Experts are named one by one, as in the model's checkpoint; PEFT fuses them as transformers 5 wants them."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(self.lora.targets),
            "bias": "none",
            "inference_mode": True,
        }


def export_peft(folder: PeftFolder, adapters: ActorWeights, mesh: Mesh, dtype: str) -> None:
    """Collective. Writes the live adapters (MegatronActor.trained_weights). Raises LeaderError on every rank."""
    stored: torch.dtype = getattr(torch, dtype)
    specs = published_specs(adapters.hf_specs, stored)
    plan = make_gather_plan(mesh.gather_world(adapters.copies), specs, _BUCKET_BYTES)
    tensors: dict[str, Tensor] = {}

    def write(buckets) -> None:
        for bucket in buckets:
            tensors.update({f"{_PREFIX}{name}": t.detach().to("cpu", copy=True) for name, t in bucket.items()})
        folder.write(tensors)

    gather_to_main(plan, adapters.parameters(), mesh, write, f"export to {folder.target}")
