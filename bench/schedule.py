"""Balance of ranks and micro-batches on recorded lengths, against recorded figures of public
frameworks.

    python bench/schedule.py [--golden tests/golden/balancing.json] [--out bench/results/schedule]

step_sync_waste: 1 - tokens / (ranks x sum over micro-batch steps of the slowest rank's tokens); 0
is perfect. The same is given for floating-point operations of a model of 8 billion parameters, when
samples are balanced by tokens and by cost. --out writes FILE.json and FILE.md.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megagrpo.batching.balance import (
    balanced_parts,
    candidate_cuts,
    cheapest_cut,
    fewest_micro_batches,
    longest_lengths,
    sample_cost,
    token_load,
)

ROOT = Path(__file__).parents[1]
HIDDEN, HEADS, KV, FFN, LAYERS, VOCAB = (
    4096,
    32 * 128,
    8 * 128,
    12288,
    36,
    151936,
)  # the model that the recorded figures assume
_LINEAR = (
    LAYERS * (2 * HIDDEN * (HEADS + KV) + 3 * HIDDEN * FFN) + HIDDEN * VOCAB
)  # multiply-adds a token
ATTENTION_LENGTH = _LINEAR // (LAYERS * HEADS)


def flops(length: int) -> float:
    """Floating-point operations of one sample's forward and backward."""
    return 6.0 * (_LINEAR * length + LAYERS * HEADS * length * length)


def make_schedule(
    lengths: Sequence[int],
    num_ranks: int,
    budget: int,
    packed: bool = True,
    multiple: int = 1,
    attention_length: int | None = None,
) -> list[list[list[int]]]:
    """Sample indices by rank and micro-batch: what the ranks of a run decide together, here one
    after the other."""
    parts = balanced_parts([sample_cost(n, attention_length) for n in lengths], num_ranks)
    own = [[lengths[i] for i in part] for part in parts]
    count = max(1, *(len(fewest_micro_batches(part, budget, packed)) for part in own))
    count = -(-count // multiple) * multiple
    longest_of_all = [
        max(values) for values in zip(*(longest_lengths(part, count) for part in own), strict=True)
    ]
    ways = [candidate_cuts(part, budget, packed, count, longest_of_all) for part in own]
    loads = [
        [[token_load(b, part, packed) for b in way] for way in of_rank]
        for part, of_rank in zip(own, ways, strict=True)
    ]
    slowest = [[max(step) for step in zip(*way, strict=True)] for way in zip(*loads, strict=True)]
    chosen = cheapest_cut(slowest, one_shape=False)
    return [
        [[part[i] for i in b] for b in of_rank[chosen]]
        for part, of_rank in zip(parts, ways, strict=True)
    ]


def step_sync_waste(loads: Sequence[Sequence[float]]) -> float:
    """loads[rank][micro-batch]: the share of time in which ranks wait, if they meet in every
    micro-batch."""
    slowest = sum(max(step) for step in zip(*loads, strict=True))
    return 1 - sum(map(sum, loads)) / (len(loads) * slowest)


def figures(lengths: Sequence[int], params: dict, attention_length: int | None) -> dict:
    start = time.perf_counter()
    ranks = make_schedule(
        lengths,
        params["dp"],
        params["max_tokens_per_gpu"],
        True,
        params["mb_group"],
        attention_length,
    )
    seconds = time.perf_counter() - start
    tokens = [[sum(lengths[i] for i in b) for b in bins] for bins in ranks]
    work = [[sum(flops(lengths[i]) for i in b) for b in bins] for bins in ranks]
    mean = sum(map(sum, work)) / len(work)
    return {
        "micro_batches_per_rank": len(tokens[0]),
        "step_sync_waste": round(step_sync_waste(tokens), 5),
        "step_sync_waste_flops": round(step_sync_waste(work), 5),
        "rank_flops_max_over_mean": round(max(map(sum, work)) / mean, 5),
        "max_micro_tokens": max(map(max, tokens)),
        "all_ranks_ms": round(1e3 * seconds, 2),
    }


def compare(cases: list[dict]) -> list[dict]:
    """One row per recorded schedule: the baseline's figures, ours by tokens, ours by cost."""
    lengths_of = {case["case"]: case["inputs"].get("lengths") for case in cases}
    rows = []
    for case in cases:
        if "step_sync_waste" not in case["outputs"]:
            continue
        lengths = case["inputs"].get("lengths") or lengths_of[case["inputs"]["same_as"]]
        keys = (
            "micro_batches_per_rank",
            "step_sync_waste",
            "rank_flops_max_over_mean",
            "max_micro_tokens",
            "over_budget",
        )
        row = {
            "case": case["case"],
            "budget": case["params"]["max_tokens_per_gpu"],
            "ranks": case["params"]["dp"],
        }
        row["baseline"] = {key: round(case["outputs"][key], 5) for key in keys}
        row |= {
            "by_tokens": figures(lengths, case["params"], None),
            "by_cost": figures(lengths, case["params"], ATTENTION_LENGTH),
        }
        wasteful = row["baseline"]["step_sync_waste"] > 0.05
        row["holds"] = {
            name: row[name]["max_micro_tokens"] <= row["budget"]
            and (
                not wasteful
                or row[name]["step_sync_waste"] <= row["baseline"]["step_sync_waste"] / 2
            )
            for name in ("by_tokens", "by_cost")
        }
        rows.append(row)
    return rows


def summary(rows: list[dict]) -> dict:
    wasteful = [row for row in rows if row["baseline"]["step_sync_waste"] > 0.05]
    out = {"schedules": len(rows), "with_baseline_waste_above_5_percent": len(wasteful)}
    out["baseline"] = {
        "worst_step_sync_waste": max(row["baseline"]["step_sync_waste"] for row in rows),
        "mean_step_sync_waste": sum(row["baseline"]["step_sync_waste"] for row in rows) / len(rows),
        "micro_batches_over_budget": sum(row["baseline"]["over_budget"] for row in rows),
        "worst_rank_flops": max(row["baseline"]["rank_flops_max_over_mean"] for row in rows),
    }
    for name in ("by_tokens", "by_cost"):
        out[name] = {
            "worst_step_sync_waste": max(row[name]["step_sync_waste"] for row in rows),
            "mean_step_sync_waste": sum(row[name]["step_sync_waste"] for row in rows) / len(rows),
            "worst_step_sync_waste_flops": max(row[name]["step_sync_waste_flops"] for row in rows),
            "mean_step_sync_waste_flops": sum(row[name]["step_sync_waste_flops"] for row in rows)
            / len(rows),
            "worst_share_of_baseline": max(
                row[name]["step_sync_waste"] / row["baseline"]["step_sync_waste"]
                for row in wasteful
            ),
            "micro_batches_over_budget": sum(
                row[name]["max_micro_tokens"] > row["budget"] for row in rows
            ),
            "worst_rank_flops": max(row[name]["rank_flops_max_over_mean"] for row in rows),
            "more_micro_batches_than_baseline": sum(
                row[name]["micro_batches_per_rank"] > row["baseline"]["micro_batches_per_rank"]
                for row in rows
            ),
            "within_budget_and_half_the_baseline": all(row["holds"][name] for row in rows),
            "slowest_ms": max(row[name]["all_ranks_ms"] for row in rows),
        }
    return out


def as_table(found: dict, header: str) -> str:
    names = ("baseline", "by_tokens", "by_cost")
    lines = [
        "# Schedule: balance of ranks and micro-batches",
        "",
        header,
        "",
        f"| | {' | '.join(names)} |",
        "|---|---|---|---|",
    ]
    for key in found["by_cost"]:
        values = [found[name].get(key, "-") for name in names]
        lines.append(
            f"| {key} | "
            f"{' | '.join(f'{v:.4f}' if isinstance(v, float) else str(v) for v in values)} |"
        )
    lines += [
        "",
        f"{found['schedules']} schedules, {found['with_baseline_waste_above_5_percent']} with a "
        "baseline waste "
        "above 5 %.",
    ]
    lines.append(
        "The bound, at most half of the baseline's waste in tokens, is one on by_tokens; by_cost "
        "evens out work, "
        "not tokens."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--golden", type=Path, default=ROOT / "tests" / "golden" / "balancing.json")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = compare(json.loads(args.golden.read_text()))
    found = summary(rows)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    origin = {"commit": commit, "date": datetime.date.today().isoformat(), "cores": os.cpu_count()}
    table = as_table(
        found,
        f"commit {commit}, {origin['date']}, {origin['cores']} cores; baselines recorded from "
        "public frameworks",
    )
    print(table)
    if args.out:
        args.out.with_suffix(".json").write_text(
            json.dumps({**origin, "summary": found, "rows": rows}, indent=1) + "\n"
        )
        args.out.with_suffix(".md").write_text(table)


if __name__ == "__main__":
    main()
