"""What does a publish of Qwen3-235B-A22B move on a cluster, and what does it take to find out here?

    python bench/plan_weights.py [--engines 8 16 32] [--hardware H100]

Runs `megagrpo plan-weights configs/qwen3_235b_a22b.yaml` once for each number of engines, with
nothing of the model but its config.json, and measures its seconds, the processor seconds of all its
processes and their memory together. Writes bench/results/plan_weights_235b.{json,md}; ends with
status 1 above 2 minutes or 8 GB.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from common import RESULTS, provenance, write_results

ROOT = Path(__file__).resolve().parent.parent
MAX_S, MAX_GB = 120, 8
HEADER = (
    "engines", "transport", "bytes on the wire", "lower bound", "busiest sender", "busiest receiver", "messages",
    "predicted s", "planned in s", "processor s", "peak GB",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--hardware", default="H100")
    args = parser.parse_args()
    runs = [_run(number, args.hardware) for number in args.engines]
    lines = [_line(run, forecast) for run in runs for forecast in run["forecasts"]]
    data = provenance() | {"hardware": args.hardware, "load": os.getloadavg()[1], "runs": runs}
    write_results("plan_weights_235b", data, HEADER, lines)
    with (RESULTS / "plan_weights_235b.md").open("a") as file:
        file.write(
            f"\nWhat the command prints for {runs[0]['engines']} "
            f"engines:\n\n```\n{runs[0]['text']}```\n"
        )
    if any(run["seconds"] > MAX_S or run["peak_gb"] > MAX_GB for run in runs):
        sys.exit(f"more than {MAX_S} s or {MAX_GB} GB")


def _run(engines: int, hardware: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "plan.json"
        command = [
            sys.executable,
            "-m",
            "megagrpo.cli",
            "plan-weights",
            "configs/qwen3_235b_a22b.yaml",
        ]
        command += ["--set", "model.path=configs/models/Qwen3-235B-A22B", "--engines", str(engines)]
        start, peak, cpu = time.monotonic(), 0, {}
        with (Path(folder) / "out.txt").open("w+") as out:
            child = psutil.Popen(
                [*command, "--hardware", hardware, "--json", str(output)], cwd=ROOT, stdout=out
            )
            while child.poll() is None:
                peak = max(peak, _memory(child, cpu))
                time.sleep(0.1)
            seconds = time.monotonic() - start
            out.seek(0)
            text = out.read()
        if child.returncode:
            raise subprocess.CalledProcessError(child.returncode, command)
        forecasts = json.loads(output.read_text())["forecasts"]
    for forecast in forecasts:
        del forecast["node_bytes"]  # large, and printed as a table
    return {
        "engines": engines,
        "seconds": seconds,
        "processor_s": sum(cpu.values()),
        "peak_gb": peak / 1e9,
        "forecasts": forecasts,
        "text": text,
    }


def _memory(process: psutil.Process, cpu: dict[int, float]) -> int:
    """Bytes resident in the process and its children; notes the processor seconds of each."""
    total = 0
    for part in (process, *process.children(recursive=True)):
        try:
            total += part.memory_info().rss
            cpu[part.pid] = sum(part.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return total


def _line(run: dict, forecast: dict) -> tuple[str, ...]:
    return (
        str(run["engines"]),
        forecast["transport"],
        f"{forecast['wire_bytes'] / 1e12:.2f} TB",
        f"{forecast['needed_bytes'] / 1e12:.2f} TB",
        f"{forecast['busiest_sender'][0]}, {forecast['busiest_sender'][1] / 1e9:.0f} GB",
        f"{forecast['busiest_receiver'][0]}, {forecast['busiest_receiver'][1] / 1e9:.0f} GB",
        f"{forecast['messages']:,}",
        f"{forecast['seconds']:.2f}",
        f"{run['seconds']:.0f}",
        f"{run['processor_s']:.0f}",
        f"{run['peak_gb']:.2f}",
    )


if __name__ == "__main__":
    main()
