"""Does the main job learn? Warm-up and GRPO for several seeds, and a control with shuffled rewards;
all are reported.

    python bench/learning.py quickstart gsm8k_calc --seeds 0 1 2

Every run is the shipped experiment with another seed (data, model, warm-up and GRPO alike) in a
folder of its own. The control starts from a seed's warm-up (the first's; `--controls 3`: of the
first three) and permutes the rewards over the samples of each step. If data/permuted.jsonl exists
(held-out rows with each other's images), the model that the first seed has trained answers it, too.
Where the experiment asks for it (eval.num_as_trained), accuracy is that of greedy answers and of
answers sampled as in training. Writes bench/results/learning_NAME.*

    python bench/learning.py quickstart --under ATEN_CPU_CAPABILITY=default --under
    "MKL_CBWR=COMPATIBLE ..."

The first seed once under each set of variables, which make libraries round as on other processors.
Writes bench/results/learning_NAME_arithmetic.*

    python bench/learning.py quickstart --families qwen3_5_moe minimax_m2

The first seed once for each family, its recipe with another family, and a control of each. Writes
bench/results/learning_NAME_families.*, of one family alone learning_NAME_FAMILY.*
"""

import argparse
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

from common import ROOT, call_megagrpo, prepare, provenance, write_config, write_results

from megagrpo.monitor.step_log import read_metrics
from megagrpo.system.environment import temporarily
from megagrpo.system.run_folder import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="+", help="names of files in configs/, without .yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--controls", type=int, default=1, help="of how many seeds rewards are shuffled, too"
    )
    parser.add_argument(
        "--under", action="append", default=[], help="variables of the environment: NAME=VALUE ..."
    )
    parser.add_argument("--families", nargs="+", default=[], help="tiny models of these instead")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", help="passed to every command"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at the same time; minutes then mean little"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "learning")
    args = parser.parse_args()
    for name in args.experiments:
        if args.under:
            _under_each(name, args)
        elif args.families:
            _of_each_family(name, args)
        else:
            _each_seed(name, args)


def _each_seed(name: str, args: argparse.Namespace) -> None:
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [pool.submit(_seed, name, seed, args.folder, args.overrides) for seed in args.seeds]
        for seed, run in list(zip(args.seeds, runs, strict=True))[: args.controls]:
            run.result()  # the control needs its warm-up
            runs.append(pool.submit(_control, name, seed, args.folder, args.overrides))
        if (args.folder / f"{name}-{args.seeds[0]}" / "data" / "permuted.jsonl").exists():
            runs.append(pool.submit(_permuted, name, args.seeds[0], args.folder))
        for _ in as_completed(runs):  # they take long: every result is kept as soon as it is there
            _write(name, args, [run.result() for run in runs if run.done()])


def _under_each(name: str, args: argparse.Namespace) -> None:
    rows = []
    for variables in ["", *args.under]:
        with ExitStack() as restore:
            for variable in variables.split():
                restore.enter_context(temporarily(*variable.split("=", 1)))
            row = _seed(name, args.seeds[0], args.folder, args.overrides)
        rows.append(row | {"run": f"{row['run']}, {variables or 'as it is'}"})
        _write_table(f"{name}_arithmetic", args, rows)


def _of_each_family(name: str, args: argparse.Namespace) -> None:
    rows, seed = [], args.seeds[0]
    table = args.families[0] if len(args.families) == 1 else "families"
    text = (ROOT / "examples" / "laptop" / f"{name}.yaml").read_text()
    for family in args.families:
        folder = args.folder / family
        folder.mkdir(parents=True, exist_ok=True)
        recipe, found = re.subn(r"family: \w+", f"family: {family}", text)
        assert found == 1, f"{name}.yaml has one model"
        (folder / "recipe.yaml").write_text(recipe)
        for run, words in ((_seed, [folder / "recipe.yaml"]), (_control, [])):
            row = run(name, seed, folder, args.overrides, *words)
            rows.append(row | {"run": f"{family}, {row['run']}"})
            _write_table(f"{name}_{table}", args, rows)


def _write(name: str, args: argparse.Namespace, rows: list[dict]) -> None:
    shutil.copyfile(
        args.folder / f"{name}-{args.seeds[0]}" / "curve.png",
        ROOT / "bench" / "results" / f"learning_{name}.png",
    )
    _write_table(name, args, rows)


def _write_table(name: str, args: argparse.Namespace, rows: list[dict]) -> None:
    both = all(row["sampled"] for row in rows)  # greedy alone where the experiment evaluates once
    accuracies = [
        f"{kind} {when}" for kind in ("greedy", "sampled") for when in ("before", "after", "rise")
    ]
    header = (
        "run",
        *(accuracies if both else ("accuracy before", "accuracy after", "rise")),
        "warm-up steps",
        "worst mismatch",
        "minutes",
    )
    write_results(
        f"learning_{name}",
        {**provenance(), "overrides": args.overrides, "rows": rows},
        header,
        [_line(r, both) for r in rows],
    )


def _seed(name: str, seed: int, root: Path, overrides: list[str], recipe: str | Path = "") -> dict:
    folder, config = root / f"{name}-{seed}", root / f"{name}-{seed}.yaml"
    shutil.rmtree(folder, ignore_errors=True)
    write_config(name, config, {f"runs/{name}": str(folder)})
    started = time.time()
    prepare(config, recipe or name, [f"seed={seed}", *overrides])
    for command in ("sft", "run"):
        call_megagrpo(command, config, [f"seed={seed}", *overrides])
    return _measure(f"seed {seed}", folder, time.time() - started)


def _control(name: str, seed: int, root: Path, overrides: list[str]) -> dict:
    folder, config = root / f"{name}-{seed}-shuffled", root / f"{name}-{seed}-shuffled.yaml"
    shutil.rmtree(folder, ignore_errors=True)
    write_config(
        name,
        config,
        {
            f"output_dir: runs/{name}": f"output_dir: {folder}",
            f"runs/{name}": str(root / f"{name}-{seed}"),
        },
    )
    started = time.time()
    call_megagrpo("run", config, [f"seed={seed}", "reward.shuffle=true", *overrides])
    return _measure(f"seed {seed}, rewards shuffled", folder, time.time() - started)


def _permuted(name: str, seed: int, root: Path) -> dict:
    folder, config = root / f"{name}-{seed}", root / f"{name}-{seed}.yaml"
    started = time.time()
    call_megagrpo("export", config, [], str(folder / "trained"))
    into = root / f"{name}-{seed}-permuted"
    shutil.rmtree(into, ignore_errors=True)
    data = folder / "data" / "permuted.jsonl"
    changes = [
        f"output_dir={into}",
        f"model.path={folder / 'trained'}",
        f"eval.data.path={data}",
        "train.num_steps=1",
    ]
    call_megagrpo("run", config, changes)
    return _measure(
        f"seed {seed} trained, held-out rows with each other's images", into, time.time() - started
    )


def _measure(label: str, folder: Path, seconds: float) -> dict:
    entries = read_metrics(RunFolder(folder))
    accuracy = _series(entries, "eval/accuracy")
    warm_up = folder / "sft"
    return {
        "run": label,
        "accuracy": accuracy,
        "before": accuracy[0][1],
        "after": accuracy[-1][1],
        "sampled": _series(
            entries, "eval_as_trained/accuracy"
        ),  # empty without eval.num_as_trained
        "warm_up_steps": read_metrics(RunFolder(warm_up))[-1]["step"] if warm_up.is_dir() else None,
        "mismatch_max": max(
            e["mismatch/logprob_abs_mean"] for e in entries if "mismatch/logprob_abs_mean" in e
        ),
        "framework_fraction": [
            e["time/framework_fraction"] for e in entries if "time/framework_fraction" in e
        ],
        "seconds": seconds,
    }


def _series(entries: list[dict], name: str) -> list[tuple[int, float]]:
    return [(entry["step"], entry[name]) for entry in entries if name in entry]


def _line(row: dict, both: bool) -> tuple[str, ...]:
    steps = "same start" if row["warm_up_steps"] is None else str(row["warm_up_steps"])
    accuracies = _ends(row["accuracy"]) + (_ends(row["sampled"]) if both else ())
    return (
        row["run"],
        *accuracies,
        steps,
        f"{row['mismatch_max']:.1e}",
        f"{row['seconds'] / 60:.1f}",
    )


def _ends(accuracy: list[tuple[int, float]]) -> tuple[str, ...]:
    """Returns accuracy before and after, and the rise."""
    before, after = accuracy[0][1], accuracy[-1][1]
    return f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"


if __name__ == "__main__":
    main()
