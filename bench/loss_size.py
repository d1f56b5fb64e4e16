"""Memory and time of a micro-batch's loss, with and without one long sample elsewhere in the step.

PYTHONPATH=. python bench/loss_size.py   # about a minute; each case in a process of its own
"""

import json
import resource
import subprocess
import sys
import time

import torch
from common import ROOT, provenance, write_results

from megagrpo.algo.loss import Denominators, LossInputs, objective
from megagrpo.algo.policy_loss import Rows
from megagrpo.batching.microbatch import MicroBatchSize, plan_micro_batches
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.schema import ParallelConfig
from megagrpo.mesh import Mesh
from megagrpo.types import Batch, Rewards

LONG, SHORT, BUDGET = 65_536, 256, 32_768
LOSSES = ("ppo_clip", "gspo")


def batch_of(lengths: torch.Tensor) -> Batch:
    """A batch whose samples have one token of a prompt."""
    tokens, samples = int(lengths.sum()), len(lengths)
    valid = torch.ones(samples, dtype=torch.bool)
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[lengths.cumsum(0) - lengths] = False
    return Batch(
        sample_ids=torch.arange(samples),
        group_ids=torch.zeros(samples, dtype=torch.int64),
        num_groups=1,
        tokens=torch.zeros(tokens, dtype=torch.int32),
        lengths=lengths,
        prompt_lengths=torch.ones_like(lengths),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(tokens),
        rewards=Rewards(torch.zeros(samples), valid),
        truncated=~valid,
        advantages=torch.ones(tokens),
        old_logprobs=torch.zeros(tokens),
    )


def measured(loss: str, lengths: list[int]) -> dict:
    """Measures the micro-batch of the most samples, all of which are short."""
    torch.set_num_threads(1)
    batch = batch_of(torch.tensor(lengths))
    mesh = Mesh(0, 1, 0, 1, None, None, 0, torch.device("cpu"))
    size = MicroBatchSize(BUDGET, True)
    micros = plan_micro_batches(batch, range(len(lengths)), size, ParallelConfig(), mesh)
    micro = max(micros, key=lambda micro: len(micro.members))
    algorithm = AlgorithmConfig(loss={"name": loss})
    denominators = Denominators(len(batch.tokens), len(lengths), 1.0)
    values = torch.zeros(len(micro.trained), requires_grad=True)
    start, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    inputs = LossInputs(
        logprobs=values * 1.0,
        entropy=values.detach(),
        loss_mask=micro.at_trained(batch.loss_mask),
        advantages=micro.at_trained(batch.advantages),
        old_logprobs=micro.at_trained(batch.old_logprobs),
        rollout_logprobs=micro.at_trained(batch.rollout_logprobs),
        rows=Rows(micro.num_trained),
        counted_tokens=micro.num_trained,
    )
    objective(inputs, algorithm, denominators)[0].backward()
    seconds = time.process_time() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    return {"samples": len(micro.members), "seconds": seconds, "mib": grown / 2**10}


CASES = {
    "400 samples of 256 tokens": [SHORT] * 400,
    "the same, and one of 65,536": [LONG] + [SHORT] * 400,
    "4,096 samples of 16 tokens": [16] * 4096,
    "the same, and one of 65,536 ": [LONG] + [16] * 4096,
}


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(measured(sys.argv[1], CASES[sys.argv[2]])))
        return
    lines, found = [], {}
    for loss in LOSSES:
        for case in CASES:
            command = [sys.executable, __file__, loss, case]
            out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
            one = found[f"{loss}, {case}"] = json.loads(out.stdout)
            figures = f"{one['seconds']:.3f} s", f"{one['mib']:.0f} MiB"
            lines.append((loss, case.strip(), str(one["samples"]), *figures))
    header = ("loss", "in the step", "samples of the micro-batch", "CPU time", "memory")
    write_results("loss_size", provenance() | {"cases": found}, header, lines)


if __name__ == "__main__":
    main()
