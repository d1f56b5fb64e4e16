"""How far the tests of several ranks are from their bounds, under each arithmetic of torch's.

    python bench/bounds.py [--arithmetic own default avx2] [--tests tests/dist/test_certify.py]

Runs the tests that compare layouts with one rank or with transformers, those of CI, one arithmetic
after the other. Per file and quantity the comparison that is nearest to its bound: difference of
bound (bound / difference). Keeps what other arithmetics gave before. Exit status 1 when a test
fails. Writes bench/results/bounds.{json,md}.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from common import RESULTS, ROOT, provenance, write_results

sys.path.insert(0, str(ROOT))
from tests.dist.bounds import RECORD
from tests.run_parts import ARITHMETIC

# "own": what torch chooses on this processor
SETTINGS = {"own": {}} | {name.removeprefix("arithmetic-"): of for name, of in ARITHMETIC.items()}
COMPARES = re.compile(r"\b(within|close|problems_of|measured)\(")


def main() -> int:
    files = [
        path.relative_to(ROOT)
        for path in sorted((ROOT / "tests" / "dist").glob("test_*.py"))
        if COMPARES.search(path.read_text())
    ]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arithmetic", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--tests", nargs="+", default=list(map(str, files)))
    args = parser.parse_args()
    kept = RESULTS / "bounds.json"
    nearest = json.loads(kept.read_text())["nearest"] if kept.exists() else {}
    status = 0
    for arithmetic in args.arithmetic:
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "comparisons.jsonl"
            record.touch()
            variables = SETTINGS[arithmetic] | {RECORD: str(record)}
            command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *args.tests]
            status |= subprocess.run(command, cwd=ROOT, env=os.environ | variables).returncode
            stems = {Path(test.partition("::")[0]).stem for test in args.tests}
            again = {
                key for key in nearest if key.split("|")[0] in stems and key.endswith(arithmetic)
            }
            nearest = {key: kept for key, kept in nearest.items() if key not in again}
            nearest |= _nearest(arithmetic, record.read_text())
        _write(nearest)
    return 1 if status else 0


def _nearest(arithmetic: str, text: str) -> dict[str, list]:
    """Returns by "file|quantity|arithmetic" the test, difference and bound of the nearest."""
    found: dict[str, list] = {}
    for test, quantity, difference, bound in map(json.loads, text.splitlines()):
        key = "|".join((Path(test.partition("::")[0]).stem, quantity, arithmetic))
        if bound == 0.0:  # no bits may differ
            continue
        if key not in found or difference / bound > found[key][1] / found[key][2]:
            found[key] = [test, difference, bound]
    return found


def _write(nearest: dict[str, list]) -> None:
    keys = sorted({tuple(key.split("|")[:2]) for key in nearest})
    arithmetics = [name for name in SETTINGS if any(key.endswith(f"|{name}") for key in nearest)]
    lines = []
    for key in keys:
        cells = [nearest.get("|".join((*key, name))) for name in arithmetics]
        lines.append((*key, *map(_cell, cells)))
    origin = provenance()
    origin["machine"] += f", own: {torch.backends.cpu.get_cpu_capability()}"
    header = ("tests/dist", "quantity", *arithmetics)
    write_results("bounds", origin | {"nearest": nearest}, header, lines)


def _cell(found: list | None) -> str:
    if found is None:
        return "-"
    _, difference, bound = found
    margin = f"{bound / difference:.1f}" if difference else "equal"
    return f"{difference:.1e} of {bound:.1e} ({margin})"


if __name__ == "__main__":
    sys.exit(main())
