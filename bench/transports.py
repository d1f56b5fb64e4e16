"""Are the engines' parameters after `reshard` those that `disk` gives, in every family and every
two layouts?

    python bench/transports.py [--families F ...] [--trainers T ...] [--engines E ...] [--transports
    reshard]

Every case is one publish of a tiny model from Megatron actors into real engines, see
tests/e2e/transport_cases.py: SGLang's own checksum of every parameter on every engine rank must be
the one after `disk`, and the bytes on the wire must be the lower bound, which is each element of
every engine rank once. Only models with experts have EP layouts. Writes
bench/results/transports.{json,md}; ends with status 1 when a case is not as it must be.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from common import provenance, write_results

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]
from transport_cases import (  # noqa: E402
    ENGINES,
    FAMILIES,
    TRAINERS,
    TransportCase,
    problems_of,
    run_engine_cases,
)

from tests.dist.workers.pool import RankPool  # noqa: E402

HEADER = (
    "family", "trainers", "engines", "transport", "parameters equal", "bytes on the wire", "lower bound", "messages",
    "staged KiB",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, choices in (("families", FAMILIES), ("trainers", TRAINERS), ("engines", ENGINES)):
        parser.add_argument(
            f"--{name}", nargs="+", choices=list(choices), default=list(choices), metavar="NAME"
        )
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=("reshard", "ipc", "broadcast", "disk"),
        default=["reshard"],
    )
    args = parser.parse_args()
    rows, pool, started = [], RankPool(), time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for family in args.families:
                for engines in args.engines:
                    cases = [TransportCase(family, trainers, engines) for trainers in args.trainers]
                    for row in run_engine_cases(pool, cases, Path(folder), args.transports):
                        rows.append(row)
                        print(" | ".join(_line(row)), *problems_of(row), flush=True)
    finally:
        pool.stop()
    data = provenance() | {"minutes": (time.monotonic() - started) / 60, "rows": rows}
    write_results("transports", data, HEADER, [_line(row) for row in rows])
    if bad := [problem for row in rows for problem in problems_of(row)]:
        sys.exit("\n".join(bad))


def _line(row: dict) -> tuple[str, ...]:
    report = row["report"]
    return (
        row["family"],
        row["trainers"],
        row["engines"],
        row["transport"],
        f"{row['equal']} of {row['parameters']}",
        f"{report['wire_bytes']:,.0f}",
        f"{row['lower_bound']:,}",
        f"{report['messages']:.0f}",
        f"{report['staging_bytes'] / 1024:.0f}",
    )


if __name__ == "__main__":
    main()
