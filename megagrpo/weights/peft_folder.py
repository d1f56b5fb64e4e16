"""Writes adapters as a PEFT folder: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megagrpo.config.actor import LoraConfig
from megagrpo.mesh import Mesh
from megagrpo.system.run_folder import whole_folder
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.transports.gather_plan import gather_to_main, make_gather_plan, published_specs

_BUCKET_BYTES = 1 << 30
_PREFIX = "base_model.model."  # of the model inside PEFT's two wrappers


@dataclass(frozen=True)
class PeftFolder:
    """Describes the adapters of one model to PEFT. base: the model's folder."""

    target: Path
    lora: LoraConfig
    base: str

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes the folder atomically; an older one is replaced."""
        with whole_folder(self.target) as draft:
            save_file(dict(tensors), draft / "adapter_model.safetensors", metadata={"format": "pt"})
            (draft / "adapter_config.json").write_text(json.dumps(self._config(), indent=2) + "\n")

    def _config(self) -> dict[str, object]:
        """Returns adapter_config.json. Experts are named one by one, as in the checkpoint; PEFT fuses them itself."""
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

    def write(buckets: Iterator[dict[str, Tensor]]) -> None:
        for bucket in buckets:
            tensors.update({f"{_PREFIX}{name}": t.detach().to("cpu", copy=True) for name, t in bucket.items()})
        folder.write(tensors)

    gather_to_main(plan, adapters.parameters(), mesh, write, f"export to {folder.target}")
