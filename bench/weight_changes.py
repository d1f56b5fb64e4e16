"""How many elements of the published weights does a step change, and what does weights.delta send
then?

    python bench/weight_changes.py quickstart smollm2

Each experiment with its warm-up, once with weights published in bfloat16 and once in float32; the
trainers' own are float32 in both. Every publish is compared, element by element, with the one
before it, and what is sent is counted. Writes bench/results/weight_changes.*
"""

import argparse
import shutil
import statistics
from pathlib import Path

from common import ROOT, call_megagrpo, prepare, provenance, write_config, write_results

from megagrpo.monitor.record import read_metrics
from megagrpo.system.run_folder import RunFolder

DTYPES = {"bfloat16": 2, "float32": 4}  # bytes of an element
HEADER = (
    "experiment",
    "published in",
    "steps",
    "changed a step: least",
    "median",
    "most",
    "sent: median",
    "all steps",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="+", help="names of files in configs/, without .yaml")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "weight_changes")
    args = parser.parse_args()
    rows: list[dict] = []
    for name in args.experiments:
        config = args.folder / f"{name}.yaml"
        write_config(name, config, {"runs/": f"{args.folder}/"})
        prepare(config, name, [])
        call_megagrpo("sft", config, [])
        for dtype in args.dtypes:
            folder = args.folder / f"{name}-{dtype}"
            shutil.rmtree(folder, ignore_errors=True)
            changes = [
                f"output_dir={folder}",
                f"rollout.dtype={dtype}",
                "actor.device=cpu",
                "log.tensorboard=false",
            ]
            call_megagrpo(
                "run", config, [*changes, "weights.transport=reshard", "weights.delta=true"]
            )
            rows.append({"experiment": name, "dtype": dtype, **_measure(folder, DTYPES[dtype])})
            data = {**provenance(), "rows": rows}
            write_results("weight_changes", data, HEADER, [_line(row) for row in rows])


def _measure(folder: Path, item: int) -> dict:
    """Returns of every publish with a step before it the share of elements that changed, and of the
    bytes sent."""
    entries = [entry for entry in read_metrics(RunFolder(folder)) if "publish/compared" in entry]
    whole = [entry["publish/compared"] for entry in entries]
    changed = [
        entry["publish/changed"] / all_of for entry, all_of in zip(entries, whole, strict=True)
    ]
    sent = [
        entry["publish/wire_bytes"] / all_of / item
        for entry, all_of in zip(entries, whole, strict=True)
    ]
    return {"changed": changed, "sent": sent}


def _line(row: dict) -> list[str]:
    changed, sent = row["changed"], row["sent"]
    shares = [
        min(changed),
        statistics.median(changed),
        max(changed),
        statistics.median(sent),
        statistics.mean(sent),
    ]
    return [
        row["experiment"],
        row["dtype"],
        str(len(changed)),
        *(f"{share:.2%}" for share in shares),
    ]


if __name__ == "__main__":
    main()
