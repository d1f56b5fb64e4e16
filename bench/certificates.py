"""`megagrpo certify` for every preset, on a dense and on a mixture-of-experts model: one table.

    python bench/certificates.py [--ranks 2] [--layouts DP2,TP2+SP,PP2,CP2,EP2] [--presets grpo
    dapo]

The quickstart experiment with its algorithm section replaced by the preset; the dense model is
Qwen3. Exit status 1 when a certificate fails. Writes bench/results/certificates.{json,md}.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

from common import prepare, provenance, quickstart_under, write_results

from megagrpo.config.load import PRESETS as PRESET_FOLDER
from megagrpo.tools.certify.cases import NEIGHBOR

ROOT = Path(__file__).resolve().parent.parent
PRESETS = sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml"))
FAMILIES = ("qwen3", "qwen3_moe")
HEADER = (
    "preset",
    "family",
    "layouts",
    "cases",
    "worst loss error",
    "worst gradient",
    "passed",
    "seconds",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layouts", help="as `megagrpo certify --layouts`; default: all that fit")
    parser.add_argument(
        "--presets",
        nargs="+",
        choices=PRESETS,
        default=PRESETS,
        metavar="NAME",
        help=f"of {', '.join(PRESETS)}",
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "certificates")
    args = parser.parse_args()
    rows = []
    where = provenance()  # before the first result changes the tree
    for family in FAMILIES:
        for preset in args.presets:
            rows.append(_certify(preset, family, args))
            write_results(
                "certificates",
                {**where, "ranks": args.ranks, "rows": rows},
                HEADER,
                [_line(row) for row in rows],
            )
    return 0 if all(row["passed"] for row in rows) else 1


def _certify(preset: str, family: str, args: argparse.Namespace) -> dict:
    folder = args.folder.resolve() / f"{preset}-{family}"
    folder.mkdir(parents=True, exist_ok=True)
    start = args.folder.resolve() / family
    text = quickstart_under(preset, folder, start)
    text = text.replace("path: " + str(start / "model"), f"path: {start / 'random'}")
    if family == "qwen3":
        text, found = re.subn(r"parallel: \{ep: 2\}", "parallel: {tp: 2}", text)
        assert found == 1, "the shipped layout has experts"
    config = folder / "experiment.yaml"
    config.write_text(text)
    if not (start / "random" / "config.json").is_file():
        recipe = folder / "recipe.yaml"
        recipe.write_text(f"model: {{family: {family}}}\n")
        prepare(config, recipe, [])
    started = time.time()
    status = _megagrpo(
        "certify",
        config,
        ["--ranks", str(args.ranks), *(["--layouts", args.layouts] if args.layouts else [])],
    )
    report = json.loads((folder / "certify" / "report.json").read_text())
    cases = [case for case in report["cases"] if case["case"]["layout"] != NEIGHBOR.layout]
    return {
        "preset": preset,
        "family": family,
        "layouts": list(dict.fromkeys(case["case"]["layout"] for case in cases)),
        "cases": len(cases),
        "loss_error": max(case["loss_error"] for case in cases),
        "gradient": max(max(case["gradients"].values(), default=0.0) for case in cases),
        "passed": status == 0 and report["passed"],
        "seconds": time.time() - started,
    }


def _megagrpo(command: str, config: Path, options: list[str]) -> int:
    print(f"== megagrpo {command} {config}", flush=True)
    python = [sys.executable, "-W", "ignore", "-m", "megagrpo.cli"]
    return subprocess.run(
        [*python, command, str(config), *options], cwd=ROOT, stdout=subprocess.DEVNULL
    ).returncode


def _line(row: dict) -> tuple[str, ...]:
    figures = (
        f"{row['loss_error']:.1e}",
        f"{row['gradient']:.1e}",
        "yes" if row["passed"] else "NO",
        f"{row['seconds']:.0f}",
    )
    return row["preset"], row["family"], ", ".join(row["layouts"]), str(row["cases"]), *figures


if __name__ == "__main__":
    sys.exit(main())
