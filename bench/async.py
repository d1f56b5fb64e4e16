"""What sampling ahead of the weights is worth: seconds a step, idle shares and accuracy of each way to do it.

    python bench/async.py --seeds 0 1 2

The task is the quickstart's with a long tail: every tenth problem asks for a digit 20 to 60 times over, up to twenty
times the tokens of a sum. Each variant starts from the same warm-up of its seed; engines have one core and trainers
another. Trainers idle while they wait for samples; engines while they have no request. Bound, order and losses are
counted from the rollouts files. The level of a seed is the best accuracy that each of its variants reaches; the time
to it is read between the evaluations beside it. Writes bench/results/async.*
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
from common import call_megagrpo, provenance, write_results
from dispatched import dispatched, not_once

from megagrpo.monitor.record import read_metrics
from megagrpo.monitor.step_lines import read_step_lines
from megagrpo.run_folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
_CORRECTED = ["algorithm.mismatch={weight: {name: tis}}"]
VARIANTS = {
    "N = 0": [],
    "N = 0, extra groups": [*_CORRECTED, "rollout.extra_groups=16"],
    "N = 1, drain": [*_CORRECTED, "rollout.max_staleness=1", "weights.in_flight=drain"],
    "N = 1, retract": [*_CORRECTED, "rollout.max_staleness=1"],
    "N = 2, drain": [*_CORRECTED, "rollout.max_staleness=2", "weights.in_flight=drain"],
    "N = 2, retract": [*_CORRECTED, "rollout.max_staleness=2"],
}
_LONG_EVERY, _LONGEST = 10, 60
_EVALUATED, _EVALUATE_EVERY = 1024, 8  # problems, so that one evaluation is right to 0.016; steps
_WARM_LOSS = 0.3  # half of all tokens are of long answers, which are soon known: the quickstart's 0.65 of the others
_SKIPPED = 2  # steps until engines and trainers are in their stride
_WAITS = ("rollout", "drain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="passed to every run")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "async")
    args = parser.parse_args()
    rows: list[dict] = []
    for seed in args.seeds:
        config = _prepare(args.folder / f"seed-{seed}", seed)
        order = None  # of prompts
        for name in args.variants:
            row = _run(name, config, seed, [f"train.num_steps={args.steps}", *args.overrides])
            prompts = row.pop("prompts")
            if "extra groups" not in name:
                order = order or prompts
                assert prompts == order, f"{name}, seed {seed}: groups in another order"
            rows.append(row)
            _write(rows, args)


def _prepare(folder: Path, seed: int) -> Path:
    """Makes data, experiment and warmed-up model, unless a former call did."""
    config = folder / "experiment.yaml"
    if (folder / "model" / "config.json").exists():
        return config
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = (ROOT / "configs" / "quickstart.yaml").read_text().replace("runs/quickstart", str(folder))
    experiment = yaml.safe_load(text)
    experiment |= {"name": "async", "seed": seed, "sampling": {"max_response_tokens": _LONGEST + 4}}
    experiment["actor"] |= {"world_size": 1, "parallel": {}}
    experiment["eval"]["every"] = _EVALUATE_EVERY
    experiment["prepare"]["dataset"]["num_eval"] = _EVALUATED
    experiment["sft"]["stop_at_loss"] = _WARM_LOSS
    config.write_text(yaml.safe_dump(experiment))
    call_megagrpo("prepare", config, [])
    for name in ("sft", "train", "eval"):
        _lengthen(folder / "data" / f"{name}.jsonl", random.Random(f"long tail {name} {seed}"))
    call_megagrpo("sft", config, [])
    return config


def _lengthen(path: Path, chance: random.Random) -> None:
    """Asks for a digit many times in every tenth problem of the file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for index in range(0, len(rows), _LONG_EVERY):
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
    return {"variant": name, "seed": seed, "seconds": time.time() - started, **_measure(RunFolder(folder))}


def _measure(folder: RunFolder) -> dict:
    entries = read_metrics(folder)
    prompts, lag = dispatched(folder.path)
    steps = [e for e in entries if "time/step_s" in e]
    timed = [e["time/step_s"] for e in steps[_SKIPPED:]]
    seconds = {}  # since the first step
    total = 0.0
    for entry in steps:
        total += entry["time/step_s"]
        seconds[entry["step"]] = total
    return {
        "step_s": sum(timed) / len(timed),
        "accuracy": [
            [e["step"], seconds.get(e["step"], 0.0), e["eval/accuracy"]] for e in entries if "eval/accuracy" in e
        ],
        "discarded_tokens": sum(e.get("extra_groups/discarded_tokens", 0.0) for e in steps),
        **_idle(folder),
        "largest_lag": lag,
        "prompts": prompts,
        "groups": len(prompts),
        "twice": not_once(prompts),
    }


def _idle(folder: RunFolder) -> dict:
    """Shares of the time in which trainers wait for samples, and engines have no request."""
    lines = [line for line in read_step_lines(folder.timeline_files()[0]) if line["step"] > _SKIPPED]
    start, end = lines[0]["start"], lines[-1]["start"] + lines[-1]["end"]
    waited = sum(until - at for line in lines for name, at, until in line["phases"] if name in _WAITS)
    requests = [(line["start"] + at, line["start"] + until) for line in lines for _, at, until, _ in line["requests"]]
    busy = _union((max(at, start), min(until, end)) for at, until in requests)
    return {"trainers_idle": waited / (end - start), "engines_idle": 1 - busy / (end - start)}


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the spans."""
    total, last = 0.0, 0.0
    for at, until in sorted(spans):
        total += max(0.0, until - max(at, last))
        last = max(last, until)
    return total


def _seconds_to_level(rows: list[dict], row: dict) -> float:
    """Of steps, until the row's accuracy is first what each variant of its seed reaches."""
    level = min(max(value for _, _, value in other["accuracy"]) for other in rows if other["seed"] == row["seed"])
    _, seconds, value = row["accuracy"][0]
    for _, next_seconds, next_value in row["accuracy"][1:]:
        if next_value >= level:
            return seconds + (next_seconds - seconds) * (level - value) / (next_value - value)
        seconds, value = next_seconds, next_value
    return seconds


def _write(rows: list[dict], args: argparse.Namespace) -> None:
    header = ("variant", "seed", "seconds a step", "trainers idle", "engines idle", "accuracy first", "accuracy last")
    header += ("seconds of steps", "seconds to level", "largest lag", "groups", "twice", "tokens thrown away")
    lines = [
        [
            row["variant"],
            str(row["seed"]),
            f"{row['step_s']:.2f}",
            f"{row['trainers_idle']:.0%}",
            f"{row['engines_idle']:.0%}",
            f"{row['accuracy'][0][2]:.3f}",
            f"{row['accuracy'][-1][2]:.3f}",
            f"{row['accuracy'][-1][1]:.0f}",
            f"{_seconds_to_level(rows, row):.0f}",
            str(row["largest_lag"]),
            str(row["groups"]),
            str(row["twice"]),
            f"{row['discarded_tokens']:.0f}",
        ]
        for row in rows
    ]
    write_results("async", {**provenance(), "overrides": args.overrides, "rows": rows}, header, lines)


if __name__ == "__main__":
    main()
