"""What does a short `megagrpo run` of the quickstart cost, by process, in seconds of CPU?

    python examples/laptop/prepare.py configs/quickstart.yaml
    megagrpo sft configs/quickstart.yaml --set sft.num_steps=60
    python bench/run_cost.py before=OTHER_TREE after=.    # writes bench/results/run_cost.md

Each tree runs 3 steps without evaluation, --runs times in turns, in new folders. A first run of
each, not counted, compiles bytecode and fills `check`'s memory. CPU seconds are user and system
time of every process below this one, from /proc every 50 ms: the last 25 ms of a process are
missing on average. The table has each tree's run with the least CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from common import ROOT, provenance, write_results

_TICKS = os.sysconf("SC_CLK_TCK")
# the first text that a process's last command line holds; a forked rank has torchrun's
_KINDS = {
    "/ray/": "Ray",
    "ray::": "Ray",
    "engine_process": "engine: server",
    "sglang::": "engine: scheduler, detokenizer",
    "megagrpo.cpu.ranks": "trainers",
    "torch.distributed.run": "trainers",
    "megagrpo.cli train": "trainers",
    "megagrpo.cli serve": "service",
    "megagrpo.cli run": "launcher",
    "rewards.worker": "graders",
}
_Key = tuple[int, int]  # pid and start of a process


class Tree:
    """Seconds of CPU and command line of each process below one, as last seen."""

    def __init__(self, root: int):
        self._root = root
        self.seconds: dict[_Key, float] = {}
        self.commands: dict[_Key, str] = {}

    def look(self) -> None:
        parents: dict[int, int] = {}
        found: dict[int, tuple[int, float, str]] = {}
        for entry in filter(lambda entry: entry.name.isdigit(), os.scandir("/proc")):
            try:
                text = Path(entry.path, "stat").read_text()
                command = Path(entry.path, "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            fields, pid = text.rpartition(")")[2].split(), int(entry.name)
            parents[pid] = int(fields[1])
            words = command.replace(b"\0", b" ").decode(errors="replace").strip()
            found[pid] = (int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS, words)
        for pid, (start, seconds, words) in found.items():
            if self._is_below(pid, parents):
                self.seconds[pid, start] = seconds
                if words:  # a zombie has none
                    self.commands[pid, start] = words

    def _is_below(self, pid: int, parents: dict[int, int]) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == self._root:
                return True
        return False

    def by_kind(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for key, seconds in self.seconds.items():
            words = self.commands.get(key, "")
            sums[next((kind for text, kind in _KINDS.items() if text in words), "other")] += seconds
        return dict(sums)


def measure(tree: Path, detail: bool) -> dict[str, float]:
    """Runs a tree's program once; returns seconds: wall, of the steps, CPU of all and by kind."""
    with tempfile.TemporaryDirectory(prefix="run-cost-") as folder:
        prepared = ROOT / "runs" / "quickstart"
        words = [f"output_dir={folder}/run", "train.num_steps=3", "eval=null", "sft=null"]
        words += [f"model.path={prepared}/model", f"data.path={prepared}/data/train.jsonl"]
        settings = [part for word in words for part in ("--set", word)]
        config = str(ROOT / "configs" / "quickstart.yaml")
        command = [sys.executable, "-P", "-m", "megagrpo.cli", "run", config, *settings]
        began = time.monotonic()
        env = os.environ | {"PYTHONPATH": str(tree)}
        run = subprocess.Popen(command, cwd=tree, env=env, stdout=subprocess.DEVNULL)
        processes = Tree(os.getpid())
        while run.poll() is None:
            processes.look()
            time.sleep(0.05)
        wall = time.monotonic() - began
        if run.returncode:
            raise SystemExit(f"{tree}: the run ended with status {run.returncode}")
        metrics = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    steps = sum(json.loads(line).get("time/step_s", 0) for line in metrics)
    for key in sorted(processes.seconds, key=lambda key: key[1]) if detail else ():
        print(f"{processes.seconds[key]:7.2f}  {processes.commands.get(key, '')[:120]}")
    kinds = processes.by_kind()
    return {"wall": wall, "steps": steps, "all CPU": sum(kinds.values()), **kinds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="+", metavar="NAME=TREE")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--detail", action="store_true", help="print every process")
    args = parser.parse_args()
    trees = {name: Path(tree).resolve() for name, tree in (text.split("=") for text in args.trees)}
    for tree in trees.values():
        measure(tree, False)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(args.runs):
        for name, tree in trees.items():
            rows[name].append(measure(tree, args.detail))
            print(name, rows[name][-1], flush=True)
    best = {name: min(runs, key=lambda run: run["all CPU"]) for name, runs in rows.items()}
    columns = ["wall", "steps", "all CPU", *dict.fromkeys(_KINDS.values()), "other"]
    lines = [[what, *(f"{run.get(what, 0):.1f}" for run in best.values())] for what in columns]
    write_results("run_cost", provenance() | {"rows": rows}, ["seconds", *trees], lines)


if __name__ == "__main__":
    main()
