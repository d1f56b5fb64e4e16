"""Do two teachers make one student? configs/quickstart_teachers.yaml for several seeds, beside the
same student trained by rewards alone, and a control whose teachers are exchanged.

    python bench/distillation.py --seeds 0 1 2

Every seed has its own data, random model, teachers (one adds, one subtracts) and student's warm-up;
its runs start from the same student. The control is of the first seed: a row's teacher is the one
that knows the other operation. Writes bench/results/distillation.{md,json,png}
"""

import argparse
import shutil
import time
from pathlib import Path

from common import ROOT, call_megagrpo, prepare, provenance, write_config, write_results

from megagrpo.monitor.step_log import read_metrics
from megagrpo.system.run_folder import RunFolder

NAME = "quickstart_teachers"
OPERATIONS = ("addition", "subtraction")
REWARDS = ["teachers={}", "algorithm={}", "data.teacher_key=null"]
HEADER = (
    "seed",
    "what the student learns from",
    "addition: before",
    "after",
    "teacher",
    "subtraction: before",
    "after",
    "teacher",
    "all: before",
    "after",
    "scoring / sampling",
    "minutes",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "distillation")
    args = parser.parse_args()
    rows: list[dict] = []
    for seed in args.seeds:
        folder = args.folder.resolve() / str(seed)
        teachers = _teachers(folder, seed)
        for label, changes in _runs(folder, control=seed == args.seeds[0]).items():
            rows.append(_run(folder, seed, label, changes) | {"teachers": teachers})
            data = {**provenance(), "rows": rows}
            write_results("distillation", data, HEADER, list(map(_line, rows)))
            _draw(rows)


def _config(folder: Path, into: Path) -> Path:
    """Writes the experiment with its data and models in `folder`, and its run in `into`."""
    config = into.with_suffix(".yaml")
    here = {f"output_dir: runs/{NAME}": f"output_dir: {into}", f"runs/{NAME}": str(folder)}
    write_config(NAME, config, here)
    return config


def _teachers(folder: Path, seed: int) -> dict[str, float]:
    """Makes data, teachers and the student's warm-up; returns each teacher's accuracy on held-out
    problems of its operation."""
    shutil.rmtree(folder, ignore_errors=True)
    config = _config(folder, folder / "start")
    own = [f"seed={seed}"]
    prepare(config, NAME, own)
    found = {}
    for name in OPERATIONS:
        model = f"model.path={folder / name}"
        longer = [f"sft.path={folder / 'data'}/sft_{name}.jsonl", "sft.num_steps=2500"]
        call_megagrpo("sft", config, [*own, model, *longer, "sft.stop_at_loss=0.03"])
        once = [f"output_dir={folder / 'of'}_{name}", "train.num_steps=1", "checkpoint.every=0"]
        call_megagrpo("run", config, [*own, model, *once, *REWARDS])
        found[name] = _series(folder / f"of_{name}", f"eval_{name}/accuracy")[0][1]
    call_megagrpo("sft", config, own)
    return found


def _runs(folder: Path, control: bool) -> dict[str, list[str]]:
    exchanged = [
        f"teachers.{name}.path={folder / other}"
        for name, other in zip(OPERATIONS, OPERATIONS[::-1], strict=True)
    ]
    runs = {"two teachers": [], "rewards": REWARDS}
    return runs | ({"control: teachers exchanged": exchanged} if control else {})


def _run(folder: Path, seed: int, label: str, changes: list[str]) -> dict:
    into = folder / label.split()[-1]
    began = time.time()
    call_megagrpo("run", _config(folder, into), [f"seed={seed}", *changes])
    names = ("eval", *(f"eval_{name}" for name in OPERATIONS))
    scored = _series(into, "teachers/score_s_mean")
    return {
        "seed": seed,
        "label": label,
        "accuracy": {name: _series(into, f"{name}/accuracy") for name in names},
        "kl": _series(into, "stream/distillation_kl"),
        "scoring_s": sum(value for _, value in scored) / len(scored) if scored else None,
        "rollout_s": [value for _, value in _series(into, "time/rollout_s")],
        "seconds": time.time() - began,
    }


def _series(folder: Path, name: str) -> list[tuple[int, float]]:
    entries = read_metrics(RunFolder(folder))
    return [(entry["step"], entry[name]) for entry in entries if name in entry]


def _line(row: dict) -> tuple[str, ...]:
    cells = [str(row["seed"]), row["label"]]
    for name in OPERATIONS:
        series = row["accuracy"][f"eval_{name}"]
        cells += [f"{series[0][1]:.3f}", f"{series[-1][1]:.3f}", f"{row['teachers'][name]:.3f}"]
    whole = row["accuracy"]["eval"]
    cells += [f"{whole[0][1]:.3f}", f"{whole[-1][1]:.3f}"]
    mean_s = sum(row["rollout_s"]) / max(len(row["rollout_s"]), 1)
    scoring = row["scoring_s"]
    cells.append("-" if scoring is None else f"{scoring:.2f} s / {mean_s:.2f} s a step")
    return (*cells, f"{row['seconds'] / 60:.1f}")


def _draw(rows: list[dict]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    colors = {"two teachers": "tab:blue", "rewards": "tab:orange"}
    for row in rows:
        steps, values = zip(*row["accuracy"]["eval"], strict=True)
        first = row["seed"] == rows[0]["seed"]
        axes.plot(
            steps,
            values,
            color=colors.get(row["label"], "tab:gray"),
            label=row["label"] if first else None,
        )
    axes.set(xlabel="step", ylabel="accuracy, held-out sums and differences", ylim=(0, 1))
    axes.legend()
    figure.tight_layout()
    figure.savefig(ROOT / "bench" / "results" / "distillation.png", dpi=120)


if __name__ == "__main__":
    main()
