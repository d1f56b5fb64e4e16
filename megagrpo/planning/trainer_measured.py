"""The trainers' memory as their real code would need it: the update of distinct ranks runs on shapes, in a child.

What stays and what forward and backward add come from it; the other parts are trainer_side's.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megagrpo.config.actor import ActorConfig
from megagrpo.planning.trainer_memory import Load, RankMemory, TrainerSide, in_flight
from megagrpo.system.environment import child_environment
from megagrpo.system.processes import spawn, stop_tree

_LIMIT_S = 1800.0
_LOG_LINES = 30
# Megatron's compiled functions would be compiled for tensors without memory.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def measured(side: TrainerSide, description: Mapping[str, Any], actor: ActorConfig, load: Load) -> TrainerSide:
    """Returns `side` with measured parts, of the first and last pipeline stage and of the fullest.

    description: the model's config.json. Raises ValueError with the end of its output when the child fails.
    """
    # what Transformer Engine's optimiser or the host would hold is not to be seen where there is no GPU
    held = ("parameters",) if actor.optimizer.megatron else ("parameters", "gradients", "optimiser")
    updates = side.ranks["update"]
    fullest = max(range(len(updates)), key=lambda number: updates[number].total)
    stages = sorted({0, fullest, len(updates) - 1})
    found = dict(zip(stages, _run(description, actor, load, [updates[n].rank for n in stages]), strict=True))
    ranks = {
        phase: tuple(
            _replaced(phase, of[n], bytes_of, in_flight(actor.parallel, n), held) for n, bytes_of in found.items()
        )
        for phase, of in side.ranks.items()
    }
    return replace(
        side, ranks=ranks, phases={phase: max(of, key=lambda rank: rank.total) for phase, of in ranks.items()}
    )


def _replaced(
    phase: str, rank: RankMemory, found: Mapping[str, int], flying: float, held: tuple[str, ...]
) -> RankMemory:
    """Returns a rank's parts of a phase, those that were measured in the place of closed forms."""
    parts = dict(rank.parts) | {name: found[name] for name in held}
    for name in ("activations", "head"):
        parts.pop(name, None)
    if phase == "load":
        parts["building"] = found["load"]
    if phase in ("logprobs", "reference"):
        parts["activations"] = found["logprobs"]
    if phase == "update":
        more = max(0.0, flying - 1) * max(0, found["two_in_flight"] - found["one_in_flight"])
        one = found["two_in_flight"] if flying == 1 else found["one_in_flight"]
        parts |= {"activations": one + more - found["head"], "head": found["head"]}
    return replace(rank, parts={name: size for name, size in parts.items() if size})


def _run(description: Mapping[str, Any], actor: ActorConfig, load: Load, ranks: list[int]) -> list[dict[str, int]]:
    # virtual stages hold the same layers; how many micro-batches' worth of them is kept, in_flight says
    one_round = actor.model_copy(
        update={
            "parallel": actor.parallel.model_copy(update={"vpp": 1}),
            "optimizer": actor.optimizer.model_copy(update={"megatron": {}}),
            "megatron": {},  # fusions and dispatchers need CUDA
            "ddp": {},
        }
    )
    with tempfile.TemporaryDirectory(prefix="megagrpo-memory-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(description))
        jobs = {
            "actor": one_round.model_dump(),
            "lengths": load.lengths,
            "imbalance": load.expert_imbalance,
            "ranks": ranks,
        }
        (folder / "jobs.json").write_text(json.dumps(jobs))
        command = [sys.executable, "-m", "megagrpo.planning.memory_child", name]
        child = spawn(command, child_environment(_ENVIRONMENT), log=folder / "log")
        try:
            status = child.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ValueError(f"the trainers' memory is not measured after {_LIMIT_S:.0f} s") from None
        finally:
            stop_tree(child.pid)
            child.wait()
        if status:
            lines = (folder / "log").read_text(errors="replace").splitlines()[-_LOG_LINES:]
            raise ValueError(f"the trainers' memory cannot be measured (status {status}):\n" + "\n".join(lines))
        return json.loads((folder / "measured.json").read_text())
