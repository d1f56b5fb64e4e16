"""What does `megagrpo plan` take here for the largest models, and what does its search find for the 235B?

    python bench/plan_command.py

Runs the command as a user does and measures its seconds, the processor seconds of all its processes and their memory
together. Writes bench/results/plan_command.{json,md}; ends with status 1 above the limits of seconds or 8 GB, or where
the search's first proposal takes longer than the shipped file.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from common import RESULTS, provenance, write_results

ROOT = Path(__file__).resolve().parent.parent
RUNS = (
    ("deepseek_v3_671b", [], 120),
    ("kimi_k2_1t", [], 120),
    ("qwen3_235b_a22b", ["--quick", "--search", "32"], 300),
)
MAX_GB = 8
HEADER = ("plan", "s", "processor s", "peak GB", "limit s", "step s", "first proposal s", "trainer GB", "cache tokens")


def main() -> None:
    runs = [_run(name, words, limit) for name, words, limit in RUNS]
    data = provenance() | {"load": os.getloadavg()[0], "runs": runs}
    write_results("plan_command", data, HEADER, [_line(run) for run in runs])
    with (RESULTS / "plan_command.md").open("a") as file:
        file.write(f"\nLoad of the machine meanwhile: {data['load']:.0f}.\n")
    slow = [run["name"] for run in runs if run["seconds"] > run["limit_s"] or run["peak_gb"] > MAX_GB]
    worse = [run["name"] for run in runs if run["proposal_s"] is not None and run["proposal_s"] > run["step_s"]]
    if slow or worse:
        sys.exit(f"above a limit: {slow}; worse than the shipped file: {worse}")


def _run(name: str, words: list[str], limit: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "megagrpo.cli", "plan", f"configs/{name}.yaml", *words, "--json", str(output)]
        start, before, peak = time.monotonic(), _processor_seconds(), 0
        with (Path(folder) / "out.txt").open("w") as out:
            child = psutil.Popen(command, cwd=ROOT, stdout=out)
            while child.poll() is None:
                peak = max(peak, _memory(child))
                time.sleep(0.1)
        seconds, processor = time.monotonic() - start, _processor_seconds() - before
        if child.returncode:
            raise subprocess.CalledProcessError(child.returncode, command)
        found = json.loads(output.read_text())
    plan, proposals = found["plan"], found["proposals"]
    return {
        "name": " ".join([name, *words]),
        "seconds": seconds,
        "processor_s": processor,
        "peak_gb": peak / 1e9,
        "limit_s": limit,
        "step_s": plan["step"],
        "proposal_s": proposals[0]["step"] if proposals else None,
        "trainer_gb": max(rank["total"] for rank in plan["trainers"].values()) / 1e9,
        "cache_tokens": plan["engine"]["cache_tokens"],
    }


def _processor_seconds() -> float:
    """Of all children that have ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _memory(process: psutil.Process) -> int:
    total = 0
    for part in (process, *process.children(recursive=True)):
        try:
            total += part.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
    return total


def _line(run: dict) -> list[str]:
    proposal = "" if run["proposal_s"] is None else f"{run['proposal_s']:,.0f}"
    return [
        run["name"], f"{run['seconds']:.0f}", f"{run['processor_s']:.0f}", f"{run['peak_gb']:.2f}",
        str(run["limit_s"]), f"{run['step_s']:,.0f}", proposal, f"{run['trainer_gb']:.1f}", f"{run['cache_tokens']:,}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
