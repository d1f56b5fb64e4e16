"""Does every preset train? The quickstart task with each of megagrpo/config/presets, all from the
same warm-up.

    python bench/presets.py [--presets grpo dapo] [--steps 30] [--set
    rollout.max_running_requests=128]

The quickstart experiment's own algorithm section is left out and the preset named instead;
everything else is as shipped. The warm-up is made once, in FOLDER/start, and used again while it
lies there. Writes bench/results/presets.{json,md}, in which rows of presets that are not run again
stay, each with its own commit.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

from common import (
    RESULTS,
    ROOT,
    call_megagrpo,
    prepare,
    provenance,
    quickstart_under,
    write_results,
)

from megagrpo.config.load import PRESETS as PRESET_FOLDER
from megagrpo.config.load import load_config
from megagrpo.monitor.step_log import read_metrics
from megagrpo.system.run_folder import RunFolder

PRESETS = sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml"))
HEADER = (
    "preset",
    "accuracy before",
    "accuracy after",
    "rise",
    "dropped groups",
    "worst mismatch",
    "minutes",
    "commit",
    "objective",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--presets",
        nargs="+",
        choices=PRESETS,
        default=PRESETS,
        metavar="NAME",
        help=f"of {', '.join(PRESETS)}",
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", help="passed to every run"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "presets")
    args = parser.parse_args()
    start = args.folder.resolve() / "start"
    if not (start / "model" / "config.json").is_file():
        config = _experiment(start, start, "grpo")
        prepare(config, "quickstart", [])
        call_megagrpo("sft", config, [])
    written = RESULTS / "presets.json"
    rows = (
        {row["preset"]: row for row in json.loads(written.read_text())["rows"]}
        if written.is_file()
        else {}
    )
    for name in args.presets:
        folder = start.with_name(name)
        shutil.rmtree(folder, ignore_errors=True)
        rows[name] = _measure(
            name,
            folder,
            _experiment(folder, start, name),
            [f"train.num_steps={args.steps}", *args.overrides],
        )
        shown = [rows[preset] for preset in PRESETS if preset in rows]
        write_results(
            "presets", {**provenance(), "rows": shown}, HEADER, [_line(row) for row in shown]
        )


def _experiment(folder: Path, start: Path, preset: str) -> Path:
    """Writes the quickstart experiment under a preset as a YAML beside its run folder; model and
    data are `start`'s."""
    config = folder.with_suffix(".yaml")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(quickstart_under(preset, folder, start))
    return config


def _measure(name: str, folder: Path, config: Path, overrides: list[str]) -> dict:
    started = time.time()
    call_megagrpo("run", config, overrides)
    entries = read_metrics(RunFolder(folder))
    accuracy = [(e["step"], e["eval/accuracy"]) for e in entries if "eval/accuracy" in e]
    return {
        "preset": name,
        "commit": provenance()["commit"],
        "overrides": overrides,
        "objective": load_config(config, overrides).algorithm.formula,
        "accuracy": accuracy,
        "before": accuracy[0][1],
        "after": accuracy[-1][1],
        "mismatch_max": max(
            e["mismatch/logprob_abs_mean"] for e in entries if "mismatch/logprob_abs_mean" in e
        ),
        "dropped_groups": sum(e.get("dynamic_sampling/dropped", 0.0) for e in entries),
        "seconds": time.time() - started,
    }


def _line(row: dict) -> tuple[str, ...]:
    figures = (
        f"{row['before']:.3f}",
        f"{row['after']:.3f}",
        f"{row['after'] - row['before']:+.3f}",
        f"{row['dropped_groups']:.0f}",
    )
    objective = row["objective"].replace("|", "\\|")
    return (
        row["preset"],
        *figures,
        f"{row['mismatch_max']:.1e}",
        f"{row['seconds'] / 60:.1f}",
        row["commit"],
        objective,
    )


if __name__ == "__main__":
    main()
