"""What the samples' files of a run say of its dispatch: the order of groups, and how old tokens
were."""

from pathlib import Path

from megagrpo.monitor.rollout_log import read_rollouts
from megagrpo.system.run_folder import RunFolder


def sampling_ahead(num_versions: int, in_flight: str) -> dict:
    """Sections of an experiment that samples so many versions ahead of the weights."""
    return {
        "algorithm": {"mismatch": {"weight": {"name": "tis"}}},
        "rollout": {"max_staleness": num_versions},
        "weights": {"in_flight": in_flight},
    }


def dispatched(folder: Path) -> tuple[list[int], int]:
    """Prompts of all groups in the order in which they were trained on, and the largest lag of a
    token in versions."""
    prompts: list[int] = []
    lag = 0
    for step, files in sorted(RunFolder(folder).rollout_files().items()):
        for group in sorted(read_rollouts(files.values()), key=lambda group: group["group_id"]):
            prompts.append(group["prompt_id"])
            # the first token is the oldest: weights get newer
            lag = max(lag, *(step - 1 - sample["weight_version"] for sample in group["samples"]))
    return prompts, lag


def not_once(prompts: list[int], epoch: int | None = None) -> int:
    """Groups that were trained on before in the same epoch of so many prompts; None: the run is less
    than one."""
    epoch = epoch or len(prompts)
    parts = [prompts[begin : begin + epoch] for begin in range(0, len(prompts), epoch)]
    return sum(len(part) - len(set(part)) for part in parts)
