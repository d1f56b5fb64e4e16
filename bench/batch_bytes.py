"""Bytes of a rank's batch where lengths have a long tail: tokens one after the other on the host,
one micro-batch at a time on the device; beside it what [N, S] tensors on the device would take.
Counted by shape, on any machine.

usage: python bench/batch_bytes.py [--samples 1024] [--longest 32768] [--budget 33000] [--no-write]
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.common import provenance, write_results
from megagrpo.batching.batch import build_batch
from megagrpo.batching.microbatch import MicroBatchSize, plan_micro_batches
from megagrpo.batching.updates import one_pass
from megagrpo.config.schema import ParallelConfig
from megagrpo.mesh import make_mesh
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample

GROUP_SIZE, PROMPT_TOKENS = 16, 200
# [N, S] at 51f2e56: token ids of 8 bytes; mask, rollout's, old and reference log-probabilities and
# advantages of 4
PADDED_BYTES = 8 + 5 * 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=32768)
    parser.add_argument("--budget", type=int, default=33000)
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    drawn = np.random.default_rng(0).lognormal(8.35, 1.05, args.samples) * args.longest / 32768
    lengths = np.clip(drawn.astype(int) + 20, 20, args.longest)
    lengths[0] = args.longest
    groups = [
        _group(number, lengths[i : i + GROUP_SIZE])
        for number, i in enumerate(range(0, len(lengths), GROUP_SIZE))
    ]
    mesh = make_mesh(0, 1, torch.device("cpu"), 60.0)
    batch = build_batch(groups, one_pass(len(groups)), mesh)
    per_token = batch.rollout_logprobs
    batch = replace(batch, advantages=per_token, old_logprobs=per_token, ref_logprobs=per_token)
    micros = plan_micro_batches(
        batch, range(len(lengths)), MicroBatchSize(args.budget, True), ParallelConfig(), mesh
    )
    at_once, one, grid = 0, 0, 0
    for micro in micros:
        # rows and columns of [N, S] were on the device, what leads from flat values to a grid was
        # not needed
        before = [micro.tokens, micro.positions, micro.rows, micro.columns, micro.cu_seqlens]
        before += vars(micro.targets).values()
        at_once += _bytes(before)
        one = max(one, _bytes([*before, micro.grid, micro.target_grid]))
        grid = max(grid, len(micro.members) * micro.longest)
    padded = len(batch.lengths) * int(batch.lengths.max())
    lines = [
        ["all samples, on the device", padded * PADDED_BYTES, 0],
        [
            "all samples, on the host",
            0,
            _bytes([*vars(batch).values(), *vars(batch.rewards).values()]),
        ],
        ["micro-batches laid out, on the device at once", at_once, one],
    ]
    what = {
        "samples": args.samples,
        "tokens": len(batch.tokens),
        "longest": int(batch.lengths.max()),
    }
    what |= {
        "filled": len(batch.tokens) / padded,
        "micro_batches": len(micros),
        "largest_grid": grid,
        "lines": lines,
    }
    table = [[name, *(f"{size / 2**20:,.1f}" for size in sizes)] for name, *sizes in lines]
    if args.no_write:
        print(what, *table, sep="\n")
        return
    write_results(
        "batch_bytes", provenance() | what, ["MiB of a rank", "padded to [N, S]", "flat"], table
    )


def _group(number: int, lengths: np.ndarray) -> RolloutGroup:
    prompt = Prompt(number, "", np.zeros(PROMPT_TOKENS), "")
    samples = [Sample(i, np.zeros(n), np.zeros(n), "stop", 0, "") for i, n in enumerate(lengths)]
    return RolloutGroup(number, prompt, tuple(samples), (Outcome("score", 1.0),) * len(samples))


def _bytes(values) -> int:
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


if __name__ == "__main__":
    main()
