"""Advantages of one step on the host: exact moments in blocks against one pass over all tokens, in
the same run.

    python bench/host_advantages.py [--samples 2048] [--tokens 3223] [--repeats 5] [--out
    bench/results]

One thread. Both ways have the same bits, which is checked. Times are medians; the ratio is of
medians.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.common import RESULTS, provenance, write_results
from megagrpo.algo import advantage
from megagrpo.algo.statistics import Moments, alone, group_statistics
from megagrpo.batching.updates import one_pass
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.types import AlgoState, Batch, Rewards

CASES = {
    "grpo": {},
    "reinforce_plus_plus": {"advantage": {"name": "reinforce_plus_plus"}},
    "reinforce_plus_plus, KL in the reward": {
        "advantage": {"name": "reinforce_plus_plus"},
        "kl": {"reward_coef": 0.01},
    },
}


def in_one_pass(values, reduce, std_ddof=1):
    """Returns what moments does, by the statistics of one group."""
    values = values.reshape(-1)
    ids, everything = (
        torch.zeros_like(values, dtype=torch.int64),
        torch.ones_like(values, dtype=torch.bool),
    )
    found = group_statistics(values, ids, 1, everything, reduce, std_ddof)
    return Moments(
        int(found.count), float(found.mean), float(found.std), float(found.min), float(found.max)
    )


def batch_of(samples: int, tokens: int) -> Batch:
    draw, total = torch.Generator().manual_seed(0), samples * tokens
    logprobs = -torch.rand(total, generator=draw)
    return Batch(
        sample_ids=torch.arange(samples),
        group_ids=torch.arange(samples) // 16,
        num_groups=samples // 16,
        tokens=torch.zeros(total, dtype=torch.int32),
        lengths=torch.full((samples,), tokens),
        prompt_lengths=torch.full((samples,), tokens // 16),
        loss_mask=(torch.arange(tokens) >= tokens // 16).repeat(samples),
        rollout_logprobs=logprobs,
        rewards=Rewards(
            torch.rand(samples, generator=draw).double(), torch.ones(samples, dtype=torch.bool)
        ),
        truncated=torch.zeros(samples, dtype=torch.bool),
        old_logprobs=logprobs,
        ref_logprobs=logprobs * 1.02,
        updates=one_pass(samples // 16),
    )


def seconds_of(batch: Batch, algorithm: AlgorithmConfig) -> tuple[float, torch.Tensor, dict]:
    start = time.perf_counter()
    found, _, metrics = advantage.with_advantages(batch, algorithm, alone, AlgoState(), 4096)
    return time.perf_counter() - start, found.advantages, metrics


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=3223, help="of every sample")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch, rows = batch_of(args.samples, args.tokens), []
    for name, options in CASES.items():
        algorithm, times = AlgorithmConfig.model_validate(options), {"blocks": [], "one pass": []}
        for _ in range(args.repeats):
            with mock.patch.object(advantage, "moments", in_one_pass):
                old, expected, said = seconds_of(batch, algorithm)
            new, found, says = seconds_of(batch, algorithm)
            assert torch.equal(found, expected) and says == said, "other bits"
            times["one pass"].append(old)
            times["blocks"].append(new)
        before, after = (statistics.median(times[way]) for way in ("one pass", "blocks"))
        rows.append(
            {"algorithm": name, "one pass s": before, "blocks s": after, "ratio": before / after}
        )
    num_tokens = args.samples * args.tokens
    header = ["algorithm", "tokens", "one pass over all tokens, s", "in blocks, s", "ratio"]
    lines = [
        [
            row["algorithm"],
            f"{num_tokens:,}",
            f"{row['one pass s']:.2f}",
            f"{row['blocks s']:.2f}",
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    write_results(
        "host_advantages",
        provenance() | {"tokens": num_tokens, "threads": 1, "rows": rows},
        header,
        lines,
        args.out,
    )


if __name__ == "__main__":
    main()
