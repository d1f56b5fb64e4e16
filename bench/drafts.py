"""Drafts over a whole run: trained in every update beside kept as the warm-up left them, from the
same warm-up.

    python bench/drafts.py [--seeds 0 1 2] [--set key=value ...]

Every run is configs/quickstart_draft.yaml. Reported are the tokens of a forward and the accepted
drafts by their place, means over the first and the last ten steps; the accuracy; and the worst
mismatch between trainer and engine, which says that samples are the model's. Writes
bench/results/drafts.{json,md}.
"""

import argparse
import shutil
from pathlib import Path
from statistics import fmean

from common import ROOT, call_megagrpo, prepare, provenance, write_config, write_results

from megagrpo.monitor.record import read_metrics
from megagrpo.system.run_folder import RunFolder

NAME = "quickstart_draft"
KINDS = {"trained": "true", "as the warm-up left it": "false"}
_ENDS = 10  # steps at either end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", help="passed to every command"
    )
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        for kind in KINDS:
            rows.append(run(seed, kind, args.overrides))
            write(rows, args.overrides)


def run(seed: int, kind: str, overrides: list[str]) -> dict:
    """One run; the first of a seed makes the warm-up."""
    root = ROOT / "runs" / "drafts"
    made, folder = root / str(seed), root / f"{seed}-{KINDS[kind]}"
    config = folder.with_suffix(".yaml")
    given = [f"seed={seed}", *overrides]
    shutil.rmtree(folder, ignore_errors=True)
    write_config(
        NAME,
        config,
        {f"output_dir: runs/{NAME}": f"output_dir: {folder}", f"runs/{NAME}": str(made)},
    )
    if kind == "trained":
        shutil.rmtree(made, ignore_errors=True)
        prepare(config, NAME, given)
        call_megagrpo("sft", config, given)
    call_megagrpo("run", config, [*given, f"actor.draft.train={KINDS[kind]}"])
    return {"seed": seed, "draft": kind} | measured(folder)


def measured(folder: Path) -> dict:
    """Means over the first and the last steps of a run, and its accuracies."""
    entries = read_metrics(RunFolder(folder))
    steps = [entry for entry in entries if "draft/tokens_per_forward" in entry]
    names = [
        "draft/tokens_per_forward",
        *sorted(name for name in steps[0] if name.startswith("draft/accepted_")),
    ]
    ends = {
        name: [fmean(e[name] for e in part) for part in (steps[:_ENDS], steps[-_ENDS:])]
        for name in names
    }
    accuracy = [entry["eval/accuracy"] for entry in entries if "eval/accuracy" in entry]
    mismatch = max(entry["mismatch/logprob_abs_mean"] for entry in steps)
    return {
        "ends": ends,
        "accuracy": [accuracy[0], accuracy[-1]],
        "mismatch": mismatch,
        "steps": len(steps),
    }


def write(rows: list[dict], overrides: list[str]) -> None:
    names = list(rows[0]["ends"])
    header = ("seed", "draft", *names, "accuracy", "worst mismatch")
    lines = [
        (
            str(row["seed"]),
            row["draft"],
            *(
                f"{first:.3f} -> {last:.3f}"
                for first, last in (row["ends"][name] for name in names)
            ),
            f"{row['accuracy'][0]:.3f} -> {row['accuracy'][1]:.3f}",
            f"{row['mismatch']:.1e}",
        )
        for row in rows
    ]
    write_results("drafts", {**provenance(), "overrides": overrides, "rows": rows}, header, lines)


if __name__ == "__main__":
    main()
