"""Does `megagrpo plan-weights` predict what bench/transports.py has counted?

    python bench/planned_bytes.py

Plans every case of bench/results/transports.json by `reshard` from the model's config.json alone, both sides pretended,
and compares bytes on the wire, messages and staging with what real trainers and engines counted. Writes
bench/results/planned_bytes.{json,md}; ends with status 1 when bytes or messages differ.
"""

import json
import sys
import tempfile
from pathlib import Path

from common import RESULTS, provenance, write_results

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]
from transport_cases import TRAINERS, experiment, make_model  # noqa: E402

from megagrpo.config.schema import ActorConfig, ExperimentConfig, ParallelConfig  # noqa: E402
from megagrpo.planning.links import HARDWARE, place_ranks  # noqa: E402
from megagrpo.planning.recordings import record_all  # noqa: E402
from megagrpo.planning.weights_report import forecast_publish  # noqa: E402

HEADER = (
    "family", "trainers", "engines", "bytes planned", "counted", "messages planned", "counted",
    "staged bytes planned", "counted",
)  # fmt: skip


def main() -> None:
    counted = json.loads((RESULTS / "transports.json").read_text())["rows"]
    counted = [row for row in counted if row["transport"] == "reshard"]
    with tempfile.TemporaryDirectory() as folder:
        for family in {row["family"] for row in counted}:
            make_model(Path(folder) / family, family)
        configs = [_experiment(Path(folder), row) for row in counted]
        rows = []
        for row, config, recorded in zip(counted, configs, record_all(configs), strict=True):
            engines, rollout = config.rollout.num_engines, config.rollout
            cluster = place_ranks(config.actor.world_size, engines, rollout.tp, rollout.nodes_per_engine, 8)
            planned = forecast_publish(config, recorded, [cluster], HARDWARE["H100"])[0][0]
            rows.append(
                {key: row[key] for key in ("family", "trainers", "engines")}
                | {"planned": [planned.wire_bytes, planned.messages]}
                | {"counted": [row["report"]["wire_bytes"], row["report"]["messages"]]}
                | {"staged": [max(planned.trainer_staging_bytes, planned.engine_staging_bytes)]}
                | {"counted_staging": row["report"]["staging_bytes"]}
            )
    write_results("planned_bytes", provenance() | {"rows": rows}, HEADER, [_line(row) for row in rows])
    if wrong := [row for row in rows if row["planned"] != row["counted"]]:
        sys.exit(f"{len(wrong)} of {len(rows)} cases are not as planned: {wrong}")


def _experiment(folder: Path, row: dict) -> ExperimentConfig:
    world, parallel = TRAINERS[row["trainers"]]
    actor = ActorConfig(world_size=world, parallel=ParallelConfig(**parallel))
    return experiment(folder / row["family"], row["engines"], "reshard").model_copy(update={"actor": actor})


def _line(row: dict) -> tuple[str, ...]:
    (bytes_planned, messages_planned), (bytes_counted, messages_counted) = row["planned"], row["counted"]
    return (
        row["family"],
        row["trainers"],
        row["engines"],
        f"{bytes_planned:,}",
        f"{bytes_counted:,.0f}",
        f"{messages_planned}",
        f"{messages_counted:.0f}",
        f"{row['staged'][0]:,}",
        f"{row['counted_staging']:,.0f}",
    )


if __name__ == "__main__":
    main()
