"""Measures trainer ranks that are not there: `python -m megagrpo.planning.memory_child FOLDER`, a process of its own.

FOLDER holds model/config.json and jobs.json: `actor`, the section of the experiment, `lengths` of one micro-batch in
tokens, `imbalance` of experts, and `ranks`. Leaves measured.json there: of every rank its bytes, and Megatron's stage.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from megagrpo.config.actor import ActorConfig
from megagrpo.config.algorithm import AlgorithmConfig

# The loss of a token is computed from a few float32 numbers of it, whatever the algorithm.
_ALGORITHM = {"advantage": {"name": "grpo"}, "loss": {"name": "ppo_clip"}, "aggregation": "token-mean"}


def _main(folder: Path) -> None:
    from megagrpo.actor.host import prepare_host

    prepare_host()
    from megagrpo.actor.pretended_update import Work, pretended_bytes

    jobs = json.loads((folder / "jobs.json").read_text())
    actor, algorithm = ActorConfig.model_validate(jobs["actor"]), AlgorithmConfig.model_validate(_ALGORITHM)
    work = Work(tuple(jobs["lengths"]), jobs["imbalance"])
    found = [pretended_bytes(folder / "model", actor, algorithm, work, rank, cuda=True) for rank in jobs["ranks"]]
    (folder / "measured.json").write_text(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
