"""Exact group statistics + GRPO advantages against a plain vectorised float32 version, in the same
run.

    python bench/group_statistics.py [--out bench/results/statistics.json]

Groups of 8 straddle the ranks (sample i lives on rank i mod DP). Times are the best of many, of the
slowest rank, gloo.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))

from megagrpo.algo.estimators import EstimatorInputs, grpo
from megagrpo.algo.statistics import group_statistics
from megagrpo.config.objective.estimators import GrpoAdvantage
from megagrpo.mesh import make_mesh

GROUP_SIZE, REPEATS = 8, 40
SIZES, WORLDS = (4096, 32768), (1, 2, 4)


def exact(rewards, ids, num_groups, valid, reduce):
    stats = group_statistics(rewards, ids, num_groups, valid, reduce, std_ddof=1)
    inputs = EstimatorInputs(
        rewards=rewards,
        token_rewards=None,
        totals=rewards,
        greedy_rewards=None,
        group_ids=ids,
        valid=valid,
        lengths=torch.ones_like(ids),
        sampled=valid,
        stats=stats,
        reduce=reduce,
    )
    return grpo(inputs, GrpoAdvantage()).float()


def plain(rewards, ids, num_groups, valid, reduce):
    """float32 sums, two passes, as one would write it first."""
    weight = valid.float()
    r = rewards.float() * weight
    sums = reduce(torch.zeros(2, num_groups).index_add_(1, ids, torch.stack((r, weight))), "sum")
    mean = sums[0] / sums[1].clamp(min=1)
    centred = (r - mean[ids]) * weight
    squares = reduce(torch.zeros(num_groups).index_add_(0, ids, centred.square()), "sum")
    std = (squares / (sums[1] - 1).clamp(min=1)).sqrt()
    return centred / (std[ids] + 1e-6)


def best_time(function, arguments, mesh) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        if mesh.dp_size > 1:
            dist.barrier()
        start = time.perf_counter()
        function(*arguments, mesh.reduce)
        slowest = mesh.reduce(torch.tensor(time.perf_counter() - start, dtype=torch.float64), "max")
        best = min(best, float(slowest))
    return best


def run_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world
    )
    mesh = make_mesh(rank, world, torch.device("cpu"), deadline_s=60)
    rows = []
    for size in SIZES:
        generator = torch.Generator().manual_seed(0)
        rewards = torch.rand(size, generator=generator, dtype=torch.float64)[
            rank::world
        ].contiguous()
        ids = (torch.arange(size) // GROUP_SIZE)[rank::world].contiguous()
        arguments = (rewards, ids, size // GROUP_SIZE, torch.ones(len(ids), dtype=torch.bool))
        gap = (exact(*arguments, mesh.reduce) - plain(*arguments, mesh.reduce)).abs().max()
        times = {
            name: best_time(f, arguments, mesh)
            for name, f in (("exact", exact), ("plain_float32", plain))
        }
        rows.append(
            {
                "responses": size,
                "dp": world,
                **{f"{k}_ms": round(1e3 * v, 3) for k, v in times.items()},
            }
        )
        rows[-1]["ratio"] = round(times["exact"] / times["plain_float32"], 2)
        rows[-1]["max_difference"] = float(mesh.reduce(gap, "max"))
    if rank == 0:
        Path(folder, f"{world}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for world in WORLDS:
            mp.spawn(run_rank, args=(world, folder), nprocs=world)
            rows += json.loads(Path(folder, f"{world}.json").read_text())
    print(
        f"{'responses':>10} {'dp':>3} {'exact ms':>9} {'float32 ms':>11} {'ratio':>6} "
        f"{'difference':>11}"
    )
    for r in rows:
        times = f"{r['exact_ms']:>9} {r['plain_float32_ms']:>11} {r['ratio']:>6}"
        print(f"{r['responses']:>10} {r['dp']:>3} {times} {r['max_difference']:>11.1e}")
    if out:
        out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
