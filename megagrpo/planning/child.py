"""Records one side of exchanges in a process of its own: `python -m megagrpo.planning.child SIDE FOLDER ...`.

Megatron's host patches and SGLang's are not for one process. A folder holds config.yaml and model/config.json; for the
trainers ranks.json, a list of ranks; for the engine arguments.json, its command line. Leaves SIDE.pickle there.
"""

import json
import pickle
import sys
from pathlib import Path

import torch

from megagrpo.config.load import load_config
from megagrpo.families.table import model_tensors, read_architecture
from megagrpo.weights.record import Specs


def hf_specs(model: Path, dtype: torch.dtype) -> Specs:
    """Returns what the HF checkpoint of a folder with a config.json holds, all but what keeps another in one dtype."""
    return {
        spec.name: (spec.shape, getattr(torch, spec.dtype) if spec.dtype else dtype)
        for spec in model_tensors(read_architecture(model))
    }


def _trainers(folder: Path) -> list:
    from megagrpo.actor.host import prepare_host

    prepare_host()
    from megagrpo.actor.pretended import record_trainer_rank

    # Transformer Engine needs CUDA; its layers take the same slices. Adapters are merged before they travel.
    changes = {"transformer_engine": False, "lora": None}
    actor = load_config(folder / "config.yaml").actor.model_copy(update=changes)
    arch = read_architecture(folder / "model")
    specs = hf_specs(folder / "model", getattr(torch, actor.dtype))
    ranks = json.loads((folder / "ranks.json").read_text())
    return [record_trainer_rank(arch, actor, specs, rank) for rank in ranks]


def _engine(folder: Path) -> list:
    from megagrpo.rollout.pretended import record_engine

    dtype = getattr(torch, load_config(folder / "config.yaml").rollout.dtype)
    arguments = json.loads((folder / "arguments.json").read_text())
    return list(record_engine(arguments, hf_specs(folder / "model", dtype)))


_SIDES = {"trainers": _trainers, "engine": _engine}

if __name__ == "__main__":
    side = sys.argv[1]
    for where in map(Path, sys.argv[2:]):
        (where / f"{side}.pickle").write_bytes(pickle.dumps(_SIDES[side](where)))
