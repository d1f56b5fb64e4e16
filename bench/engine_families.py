"""What engines of the large families compute after a publish, against transformers: every case of
COMPUTED, see there.

    python bench/engine_families.py [--families F ...] [--engines E ...] [--transports disk
    broadcast reshard]

A case is a publish of a tiny random model from Megatron actors into a real engine whose parameters
were others, as in tests/e2e/test_transports.py: parameters bit-equal to what `disk` gives, digests
passed, and log-probabilities of 104 prompt and sampled tokens against transformers in float32. Adds
to what an earlier call for other cases has written to bench/results/engine_families.{json,md}; ends
with status 1 when a case is not as it must be.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from common import RESULTS, provenance, write_results

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]
from transport_cases import COMPUTED, problems_of, run_computed  # noqa: E402

from tests.dist.workers.pool import RankPool  # noqa: E402

NAME = "engine_families"
HEADER = (
    "family",
    "trainers",
    "engine",
    "transport",
    "parameters equal",
    "log-probs: mean",
    "largest",
)
TRANSPORTS = ("disk", "broadcast", "reshard")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, place in (("families", 0), ("engines", 1)):
        choices = list(dict.fromkeys(case[place] for case in COMPUTED))
        parser.add_argument(
            f"--{name}", nargs="+", choices=choices, default=choices, metavar="NAME"
        )
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    args = parser.parse_args()
    file, pool = RESULTS / f"{NAME}.json", RankPool()
    rows = {_key(row): row for row in json.loads(file.read_text())["rows"]} if file.exists() else {}
    new = []
    try:
        for family, engines in COMPUTED:
            if family in args.families and engines in args.engines:
                with tempfile.TemporaryDirectory() as folder:
                    new += list(run_computed(pool, family, engines, Path(folder), args.transports))
    finally:
        pool.stop()
    rows |= {_key(row): row for row in new}
    ordered = [rows[key] for key in sorted(rows)]
    write_results(NAME, provenance() | {"rows": ordered}, HEADER, list(map(_line, ordered)))
    if bad := [problem for row in new for problem in problems_of(row)]:
        sys.exit("\n".join(bad))


def _key(row: dict) -> tuple[str, ...]:
    return tuple(row[name] for name in ("family", "engines", "trainers", "transport"))


def _line(row: dict) -> tuple[str, ...]:
    equal, distance = f"{row['equal']} of {row['parameters']}", row["logprobs"]
    cells = (row["family"], row["trainers"], row["engines"], row["transport"], equal)
    return (*cells, f"{distance['mean']:.1e}", f"{distance['largest']:.1e}")


if __name__ == "__main__":
    main()
