"""What sampling ahead of the weights is worth: seconds a step, idle shares and accuracy of each way
to do it.

    python bench/async.py --seeds 0 1 2 [--long-every 10]

The task is the quickstart's with a long tail: every 32nd problem (or every tenth) asks for a digit
20 to 60 times over, up to twenty times the tokens of a sum. Seconds are those of steps without
their evaluations. Each variant starts from the same warm-up of its seed; engines have one core and
trainers another. Trainers idle while they wait for samples.
Bound, order and losses are counted from the rollouts files. The level of a seed is the best
accuracy that each of its variants reaches; the time to it is read between the evaluations beside
it, and compared with that of N = 0. Rows "mean" are of the seeds' mean accuracies and seconds.
Writes bench/results/async.*, or async_10.*
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml
from common import call_megagrpo, prepare, provenance, write_results
from dispatched import dispatched, not_once

from megagrpo.monitor.step_log import read_metrics
from megagrpo.system.run_folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
_CORRECTED = ["algorithm.mismatch={weight: {name: tis}}"]
VARIANTS = {
    "N = 0": [],
    "N = 1, drain": [*_CORRECTED, "rollout.max_staleness=1", "weights.in_flight=drain"],
    "N = 1, retract": [*_CORRECTED, "rollout.max_staleness=1"],
    "N = 2, drain": [*_CORRECTED, "rollout.max_staleness=2", "weights.in_flight=drain"],
    "N = 2, retract": [*_CORRECTED, "rollout.max_staleness=2"],
}
_LONGEST = 60  # digits
_EVALUATED, _EVALUATE_EVERY = 1024, 8  # problems, so that one evaluation is right to 0.016; steps
# By how seldom a problem is long: long answers are soon known, the loss of the others is the
# quickstart's 0.65.
_WARM_LOSS = {32: 0.45, 10: 0.3}
_SKIPPED = 2  # steps until engines and trainers are in their stride


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--long-every", type=int, default=32, choices=_WARM_LOSS, help="problems")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", help="passed to every run"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "async")
    args = parser.parse_args()
    rows: list[dict] = []
    for seed in args.seeds:
        config = _prepare(
            args.folder / f"every-{args.long_every}" / f"seed-{seed}", seed, args.long_every
        )
        order = None  # of prompts
        for name in args.variants:
            row = _run(name, config, seed, [f"train.num_steps={args.steps}", *args.overrides])
            prompts = row.pop("prompts")
            order = order or prompts
            assert prompts == order, f"{name}, seed {seed}: groups in another order"
            rows.append(row)
            _write(rows, args)


def _prepare(folder: Path, seed: int, long_every: int) -> Path:
    """Makes data, experiment and warmed-up model, unless a former call did."""
    config = folder / "experiment.yaml"
    if (folder / "model" / "config.json").exists():
        return config
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = (
        (ROOT / "configs" / "quickstart.yaml").read_text().replace("runs/quickstart", str(folder))
    )
    experiment = yaml.safe_load(text)
    experiment |= {"name": "async", "seed": seed, "sampling": {"max_response_tokens": _LONGEST + 4}}
    experiment["actor"] |= {"world_size": 1, "parallel": {}}
    experiment["eval"]["every"] = _EVALUATE_EVERY
    experiment["sft"]["stop_at_loss"] = _WARM_LOSS[long_every]
    config.write_text(yaml.safe_dump(experiment))
    recipe = yaml.safe_load((ROOT / "examples" / "laptop" / "quickstart.yaml").read_text())
    recipe["dataset"]["num_eval"] = _EVALUATED
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    prepare(config, file, [])
    for name in ("sft", "train", "eval"):
        _lengthen(
            folder / "data" / f"{name}.jsonl", random.Random(f"long tail {name} {seed}"), long_every
        )
    call_megagrpo("sft", config, [])
    return config


def _lengthen(path: Path, chance: random.Random, every: int) -> None:
    """Asks for a digit many times in every so manieth problem of the file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for index in range(0, len(rows), every):
        digit, times = chance.randrange(10), chance.randrange(_LONGEST // 3, _LONGEST)
        rows[index] |= {"prompt": f"{digit}<{times}>", "answer": str(digit) * times}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _start(command: str, config: Path, overrides: Sequence[str], core: int) -> subprocess.Popen:
    settings = [part for override in overrides for part in ("--set", override)]
    words = [sys.executable, "-W", "ignore", "-m", "megagrpo.cli", command, str(config), *settings]
    cores = sorted(os.sched_getaffinity(0))
    return subprocess.Popen(["taskset", "-c", str(cores[core % len(cores)]), *words], cwd=ROOT)


def _run(name: str, config: Path, seed: int, overrides: Sequence[str]) -> dict:
    folder = config.parent / name.replace(" ", "").replace(",", "_").replace("=", "")
    shutil.rmtree(folder, ignore_errors=True)
    settings = [f"output_dir={folder}", *VARIANTS[name], *overrides]
    print(f"== {name}, seed {seed}", flush=True)
    started = time.time()
    service = _start("serve", config, settings, core=0)
    try:
        trainers = _start("train", config, settings, core=1)
        assert trainers.wait() == 0, f"{name}, seed {seed} failed: see {folder}"
    finally:
        service.terminate()
        service.wait()
    return {
        "variant": name,
        "seed": seed,
        "seconds": time.time() - started,
        **_measure(RunFolder(folder)),
    }


def _measure(folder: RunFolder) -> dict:
    entries = read_metrics(folder)
    prompts, lag = dispatched(folder.path)
    steps = [e for e in entries if "time/step_s" in e]
    trained = {e["step"]: e["time/step_s"] - e["time/evaluate_s"] for e in steps}
    timed = list(trained.values())[_SKIPPED:]
    seconds = {}  # since the first step
    total = 0.0
    for step, of_step in trained.items():
        total += of_step
        seconds[step] = total
    return {
        "step_s": _mean(timed),
        "accuracy": [
            [e["step"], seconds.get(e["step"], 0.0), e["eval/accuracy"]]
            for e in entries
            if "eval/accuracy" in e
        ],
        "trainers_idle": sum(e["time/rollout_s"] for e in steps)
        / sum(e["time/step_s"] for e in steps),
        "largest_lag": lag,
        "prompts": prompts,
        "groups": len(prompts),
        "twice": not_once(prompts),
    }


def _seconds_to_level(rows: list[dict], row: dict) -> float:
    """Of steps, until the row's accuracy is first what each variant of its seed reaches."""
    level = min(
        max(value for _, _, value in other["accuracy"])
        for other in rows
        if other["seed"] == row["seed"]
    )
    _, seconds, value = row["accuracy"][0]
    for _, next_seconds, next_value in row["accuracy"][1:]:
        if next_value >= level:
            return seconds + (next_seconds - seconds) * (level - value) / (next_value - value)
        seconds, value = next_seconds, next_value
    return seconds


def _means(rows: list[dict]) -> list[dict]:
    """Returns a row over the seeds for each variant that several have."""
    found = []
    for name in VARIANTS:
        of = [row for row in rows if row["variant"] == name]
        if len(of) < 2:
            continue
        mean = {key: _mean(row[key] for row in of) for key in ("step_s", "trainers_idle")}
        curves = zip(*(row["accuracy"] for row in of), strict=True)  # by evaluation, then by seed
        mean["accuracy"] = [
            [_mean(column) for column in zip(*points, strict=True)] for points in curves
        ]
        sums = {key: sum(row[key] for row in of) for key in ("groups", "twice")}
        largest = {"largest_lag": max(row["largest_lag"] for row in of)}
        found.append({"variant": name, "seed": "mean", **mean, **sums, **largest})
    return found


def _mean(values: Iterable[float]) -> float:
    several = list(values)
    return sum(several) / len(several)


def _write(runs: list[dict], args: argparse.Namespace) -> None:
    header = (
        "variant",
        "seed",
        "seconds a step",
        "trainers idle",
        "accuracy first",
        "accuracy last",
    )
    header += (
        "seconds of steps",
        "seconds to level",
        "times faster to it",
        "largest lag",
        "groups",
        "twice",
    )
    rows = [*_means(runs), *runs]
    in_turns = {
        row["seed"]: _seconds_to_level(rows, row) for row in rows if row["variant"] == "N = 0"
    }
    lines = [
        [
            row["variant"],
            str(row["seed"]),
            f"{row['step_s']:.2f}",
            f"{row['trainers_idle']:.0%}",
            f"{row['accuracy'][0][2]:.3f}",
            f"{row['accuracy'][-1][2]:.3f}",
            f"{row['accuracy'][-1][1]:.0f}",
            f"{_seconds_to_level(rows, row):.0f}",
            f"{in_turns[row['seed']] / _seconds_to_level(rows, row):.2f}"
            if row["seed"] in in_turns
            else "",
            str(row["largest_lag"]),
            str(row["groups"]),
            str(row["twice"]),
        ]
        for row in rows
    ]
    name = "async" if args.long_every == 32 else f"async_{args.long_every}"
    write_results(name, {**provenance(), "overrides": args.overrides, "rows": runs}, header, lines)


if __name__ == "__main__":
    main()
