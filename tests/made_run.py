"""A small made-up run folder, written by the project's own writers."""

from pathlib import Path

import numpy as np
import torch

from megagrpo.config.schema import LogConfig
from megagrpo.monitor.rollout_log import RolloutLog
from megagrpo.monitor.run_record import cut_record
from megagrpo.monitor.step_log import StepLog
from megagrpo.monitor.trained import TrainedLog
from megagrpo.system.run_folder import RunFolder
from megagrpo.types import Batch, Outcome, Prompt, RolloutGroup, Sample
from tests.padding import batch_of_rows

GROUP_SIZE = 4
HOSTILE = (
    "</script><script>document.title = 'taken over'</script><img src=http://127.0.0.1:9/x "
    "onerror=alert(1)>"
    " \u2028 {{DATA}} <!-- <b>'\"&amp;"
)


def made_groups(step: int, num_groups: int = 3) -> list[RolloutGroup]:
    """Every group's first sample is right; the last one of group 0 tries to break out of the page."""
    groups = []
    for number in range(num_groups):
        prompt = Prompt(100 * step + number, f"What is {step} + {number}?", (1, 2, 3), str(step + number))
        texts = [str(step + number), "seven", f"banana {step}", HOSTILE if number == 0 else "nothing"]
        samples = tuple(
            Sample(i, (5, 6, 9)[: 2 + i % 2], (-0.5,) * (2 + i % 2), "length" if i == 3 else "stop", step - 1, text)
            for i, text in enumerate(texts)
        )
        outcomes = (*(Outcome("score", float(i == 0)) for i in range(3)), Outcome("timeout", detail="2 s"))
        groups.append(RolloutGroup(number, prompt, samples, outcomes))
    return groups


def made_batch(groups: list[RolloutGroup], difference: float = 2e-3) -> Batch:
    """The batch of these groups: the trainer's log-probabilities are the engine's plus `difference`."""
    rows = [(group, sample) for group in groups for sample in group.samples]
    n, width = len(rows), 6
    tokens, mask = torch.zeros(n, width, dtype=torch.int64), torch.zeros(n, width)
    for i, (group, sample) in enumerate(rows):
        ids = np.concatenate([group.prompt.token_ids, sample.token_ids])
        tokens[i, : len(ids)] = torch.from_numpy(ids)
        mask[i, 3 : len(ids)] = 1
    advantages = torch.tensor([1.5, -0.5, -1.0, 0.0] * len(groups))[:, None] * mask
    rollout = -0.5 * mask
    ids = torch.tensor([[group.group_id * GROUP_SIZE + sample.index, group.group_id] for group, sample in rows])
    verdicts = {"rewards": torch.zeros(n, dtype=torch.float64), "valid": torch.ones(n, dtype=torch.bool)}
    lengths = {"lengths": mask.sum(1).long() + 3, "prompt_lengths": torch.full((n,), 3)}
    values = {"tokens": tokens, "loss_mask": mask, "rollout_logprobs": rollout, "advantages": advantages}
    values |= {"old_logprobs": rollout + difference * mask, "truncated": torch.zeros(n, dtype=torch.bool)}
    groups_of = {"sample_ids": ids[:, 0], "group_ids": ids[:, 1], "num_groups": len(groups)}
    return batch_of_rows(**groups_of, **lengths, **values, **verdicts)


def make_run(path: Path, num_steps: int = 5, start_step: int = 0) -> RunFolder:
    """A run of two ranks and two engines."""
    folder = RunFolder(path)
    cut_record(folder, start_step)
    log = StepLog(folder, LogConfig(tensorboard=False), start_step)
    rollouts = RolloutLog(folder, 0)
    trained = TrainedLog(folder, 0, 2, lambda ids: [{5: " one", 6: "<b>", 9: "é"}[i] for i in ids])
    for step in range(start_step + 1, num_steps + 1):
        log.write(step, {"reward/mean": step / 10})
        groups = made_groups(step)
        rollouts.write(step, groups)
        batch = made_batch(groups)
        trained.write(step, batch, batch.old_logprobs)
    for writer in (log, rollouts, trained):
        writer.close()
    return folder
