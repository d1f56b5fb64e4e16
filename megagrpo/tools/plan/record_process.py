"""Records one side of exchanges in a process of its own: `python -m
megagrpo.tools.plan.record_process SIDE FOLDER ...`.

Megatron's and SGLang's patches of the host exclude each other. A folder holds config.yaml and
model/config.json; for the trainers ranks.json, a list of ranks; for the engine arguments.json, its
command line on a CPU. Writes SIDE.pickle there.
"""

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megagrpo.config.load import load_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.model import Model
from megagrpo.families.table import model_tensors
from megagrpo.weights.copies.record import Specs
from megagrpo.weights.quantised import quantised_specs


def hf_specs(model: Path, dtype: torch.dtype, draft: bool = False) -> Specs:
    """Returns the tensors of a folder's checkpoint by its config.json, in `dtype` unless a tensor
    fixes another."""
    return {
        spec.name: (spec.shape, getattr(torch, spec.dtype) if spec.dtype else dtype)
        for spec in model_tensors(Model.read(model, draft=draft).arch)
    }


def fp8_names(model: Path, config: ExperimentConfig) -> set[str]:
    """Returns the tensors of a folder's checkpoint that the experiment's engines keep in FP8."""
    if config.rollout.quantization is None:
        return set()
    arch = Model.read(model, draft=config.actor.has_draft).arch
    return {spec.name for spec in model_tensors(arch) if spec.in_fp8}


def engine_specs(model: Path, config: ExperimentConfig) -> Specs:
    """Returns the tensors that are published to engines, scales of FP8 included, by the folder's
    config.json."""
    specs = hf_specs(model, getattr(torch, config.rollout.dtype), config.actor.has_draft)
    return quantised_specs(specs, fp8_names(model, config))


def _trainers(folders: list[Path]) -> Iterator[list]:
    from megagrpo.actor.host import prepare_host

    prepare_host()
    from megagrpo.tools.plan.trainer_dry_run import record_trainer_rank

    for folder in folders:
        # Transformer Engine and settings for it need CUDA; its layers take the same slices.
        # Adapters are merged before they travel.
        actor = load_config(folder / "config.yaml").actor
        actor = actor.model_copy(update={"transformer_engine": False, "lora": None, "megatron": {}})
        arch = Model.read(folder / "model", draft=actor.has_draft).arch
        specs = hf_specs(folder / "model", getattr(torch, actor.dtype), actor.has_draft)
        ranks = json.loads((folder / "ranks.json").read_text())
        yield [record_trainer_rank(arch, actor, specs, rank) for rank in ranks]


def _engine(folders: list[Path]) -> Iterator[list]:
    from megagrpo.tools.plan.engine_dry_run import record_engine

    for folder in folders:
        config = load_config(folder / "config.yaml")
        arguments = json.loads((folder / "arguments.json").read_text())
        yield list(record_engine(arguments, engine_specs(folder / "model", config)))


def _main(side: str, folders: list[Path]) -> None:
    record: Callable[[list[Path]], Iterator] = _trainers if side == "trainers" else _engine
    for folder, found in zip(folders, record(folders), strict=True):
        (folder / f"{side}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    _main(sys.argv[1], list(map(Path, sys.argv[2:])))
