"""Does `megagrpo plan-weights` predict what bench/transports.py has counted?

    python bench/planned_bytes.py

Plans every case that bench/transports.py has run on this machine by `reshard`, from the model's
config.json alone, both sides pretended, and compares bytes on the wire, messages and staging with
what real trainers and engines counted. Writes bench/results/planned_bytes.md; ends with status 1
when they differ.
"""

import json
import sys
import tempfile
from pathlib import Path

from common import RESULTS, provenance, write_results

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]
from planned_cases import plan_cases, planning_problems  # noqa: E402
from transport_cases import TransportCase  # noqa: E402

HEADER = (
    "family", "trainers", "engines", "bytes planned", "counted", "messages planned", "counted",
    "staged bytes planned, at most", "counted",
)  # fmt: skip


def main() -> None:
    measured = RESULTS / "transports.json"
    if not measured.exists():
        sys.exit(f"{measured} does not exist; python bench/transports.py writes it")
    counted = json.loads(measured.read_text())["rows"]
    counted = [row for row in counted if row["transport"] == "reshard"]
    cases = [TransportCase(row["family"], row["trainers"], row["engines"]) for row in counted]
    with tempfile.TemporaryDirectory() as folder:
        planned = plan_cases(cases, Path(folder))
    rows = []
    for row, forecast in zip(counted, planned, strict=True):
        report = row["report"]
        rows.append(
            {key: row[key] for key in ("family", "trainers", "engines")}
            | {
                "bytes": [forecast.wire_bytes, int(report["wire_bytes"])],
                "messages": [forecast.messages, int(report["messages"])],
                "staging": [
                    max(forecast.trainer_staging_bytes, forecast.engine_staging_bytes),
                    int(report["staging_bytes"]),
                ],
                "problems": planning_problems(row, forecast),
            }
        )
    lines = [
        (
            *(row[key] for key in ("family", "trainers", "engines")),
            *(f"{value:,}" for key in ("bytes", "messages", "staging") for value in row[key]),
        )
        for row in rows
    ]
    write_results("planned_bytes", provenance() | {"rows": rows}, HEADER, lines)
    if problems := [text for row in rows for text in row["problems"]]:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
