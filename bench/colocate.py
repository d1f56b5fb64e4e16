"""The quickstart with colocated engines, which sleep while the actor trains, against engines beside
the trainers.

    python bench/colocate.py [--steps 90] [--seed 0] [--jobs 1]

One warm-up, then both runs from it with deterministic engines: rollout.colocate with ipc, and
reshard. Compared are every sample and the bits of every measured value that is no time. Writes
bench/results/colocate.*
"""

import argparse
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from common import ROOT, call_megagrpo, prepare, provenance, write_config, write_results

from megagrpo.monitor.rollout_log import read_rollouts
from megagrpo.monitor.step_log import read_metrics
from megagrpo.system.run_folder import RunFolder

SIDES = {
    "beside, reshard": ["weights.transport=reshard"],
    "colocated, ipc": ["weights.transport=ipc", "rollout.colocate=true"],
}
TIMES = ("time/", "perf/", "publish/", "pipeline/", "schedule/")  # what the clock says


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="2: both runs at the same time; seconds then mean little",
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "colocate")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    common = [f"seed={args.seed}", f"train.num_steps={args.steps}", "rollout.deterministic=true"]
    warm = args.folder / "warm.yaml"
    write_config("quickstart", warm, {"runs/quickstart": str(args.folder / "warm")})
    prepare(warm, "quickstart", common)
    call_megagrpo("sft", warm, common)

    def run(number: int, words: list[str]) -> RunFolder:
        folder, config = args.folder / f"run{number}", args.folder / f"run{number}.yaml"
        output = {
            "output_dir: runs/quickstart": f"output_dir: {folder}",
            "runs/quickstart": str(args.folder / "warm"),
        }
        write_config("quickstart", config, output)
        call_megagrpo("run", config, [*common, *words])
        return RunFolder(folder)

    with ThreadPoolExecutor(args.jobs) as pool:
        folders = list(pool.map(run, range(len(SIDES)), SIDES.values()))
    entries = [read_metrics(folder) for folder in folders]
    different = _different(*entries)
    samples = [
        {
            step: list(read_rollouts(files.values()))
            for step, files in folder.rollout_files().items()
        }
        for folder in folders
    ]
    steps = [step for step in samples[0] if samples[0][step] != samples[1].get(step)]
    rows = [_row(side, found) for side, found in zip(SIDES, entries, strict=True)]
    data = {
        **provenance(),
        "options": vars(args) | {"folder": ""},
        "different": different,
        "steps": steps,
        "rows": rows,
    }
    same = (
        "every sample and every value that is no time: the same bits"
        if not different and not steps
        else "DIFFERENT"
    )
    header = (
        "engines",
        "accuracy before",
        "accuracy after",
        "median step, s",
        "median publish, s",
        "compared",
    )
    write_results("colocate", data, header, [[*map(str, row.values()), same] for row in rows])
    if different or steps:
        raise SystemExit(f"different: {different[:10]}, samples of steps {steps[:10]}")


def _different(one: list[dict], other: list[dict]) -> list[str]:
    """Returns "step name" of each value that one run has and the other has not, or has with other
    bits."""
    found = []
    for mine, theirs in zip(one, other, strict=True):
        names = {name for name in mine.keys() | theirs.keys() if not name.startswith(TIMES)}
        found += [
            f"{mine['step']} {name}" for name in sorted(names) if mine.get(name) != theirs.get(name)
        ]
    return found


def _row(side: str, entries: list[dict]) -> dict:
    accuracy = [entry["eval/accuracy"] for entry in entries if "eval/accuracy" in entry]
    median = {
        name: np.median([entry[name] for entry in entries if entry["step"] and name in entry])
        for name in ("time/step_s", "publish/total")
    }
    return {
        "engines": side,
        "before": f"{accuracy[0]:.3f}",
        "after": f"{accuracy[-1]:.3f}",
        "step_s": f"{median['time/step_s']:.2f}",
        "publish_s": f"{median['publish/total']:.2f}",
    }


if __name__ == "__main__":
    main()
