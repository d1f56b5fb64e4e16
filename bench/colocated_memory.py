"""Memory by phase of a colocated run of the 135M model: what `check` and `plan` say against what
its processes hold.

    python bench/colocated_memory.py [--steps 3]

A CPU's engine releases nothing and there is no context, so that the trainer's side is compared: its
parts by phase with the anonymous and shared memory of its process less that before it built the
model. What leaves a GPU for the host is in the same memory here: counted as a part of its own.
Writes bench/results/colocated_memory.*
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from common import ROOT, call_megagrpo, prepare, provenance, write_config, write_results

from megagrpo.check.fitting import experiment_memory
from megagrpo.config.load import load_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.model import Model
from megagrpo.system.environment import child_environment
from megagrpo.system.run_folder import RunFolder

SHARED = ["rollout.colocate=true", "weights.transport=ipc", "eval=null", "actor.threads=1"]
PHASES = ("rollout", "logprobs", "update", "publish")
LOOK_S = 0.05
# glibc keeps what is freed, for itself; a device's allocator is asked for what it has handed out
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 19), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "colocated_memory")
    args = parser.parse_args()
    config, settings = args.folder / "run.yaml", [*SHARED, f"train.num_steps={args.steps}"]
    shutil.rmtree(args.folder, ignore_errors=True)  # else a finished run has no step to measure
    args.folder.mkdir(parents=True)
    write_config("smollm2", config, {"runs/smollm2": str(args.folder / "run")})
    prepare(config, "smollm2", settings)
    call_megagrpo("sft", config, [*settings, "sft.num_steps=1"])
    bare, samples = watch(config, settings)
    experiment = load_config(config, settings)
    planned = plan(experiment)
    measured = by_phase(RunFolder(Path(experiment.output_dir)), bare, samples)
    lines = []
    for phase in (
        phase for phase in PHASES if measured.get(phase)
    ):  # one update of a step needs no old log-probs
        total, found = sum(planned[phase].values()), measured[phase]
        parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in planned[phase].items())
        lines.append(
            [phase, parts, f"{total / 1e9:.2f}", f"{found / 1e9:.2f}", f"{found / total:.2f}"]
        )
    data = {**provenance(), "planned": planned, "measured": measured}
    header = ["phase", "parts, GB", "planned trainer, GB", "measured, GB", "measured / planned"]
    write_results("colocated_memory", data, header, lines)


def plan(config: ExperimentConfig) -> dict[str, dict[str, float]]:
    """Returns the bytes of the trainer's parts by phase, with what is on the host while engines are
    awake."""
    memory = experiment_memory(config, Model.read(Path(config.model.path)).arch)
    phases = memory.phases
    # its place stays in an update, too
    host = {"optimiser on the host": memory.trainers.phases["rollout"].parts["optimiser"]}
    trainer = {
        p: {n: s for n, s in phases[p].parts.items() if not n.startswith("engine's")}
        for p in PHASES
    }
    return {phase: parts | host for phase, parts in trainer.items()}


def watch(config: Path, settings: list[str]) -> tuple[int, list[tuple[float, int]]]:
    """Runs the experiment. Returns its trainer's bytes without a model, and (time, bytes) at any
    time."""
    words = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-W", "ignore", "-m", "megagrpo.cli", "run", str(config), *words]
    run = subprocess.Popen(
        command, cwd=ROOT, env=child_environment(RETURNED), stdout=subprocess.PIPE, text=True
    )
    samples: list[tuple[float, int]] = []

    def look() -> None:
        trainer = None
        while run.poll() is None:
            try:
                trainer = trainer or _trainer(run.pid)
                if trainer is not None:
                    samples.append((time.time(), _held(trainer.pid)))
            except (psutil.NoSuchProcess, OSError, IndexError):  # it ends
                trainer = None
            time.sleep(LOOK_S)

    watcher = threading.Thread(target=look)
    watcher.start()
    built = 0.0
    assert run.stdout is not None
    for line in run.stdout:
        print(line, end="", flush=True)
        if "build the model" in line and not built:
            built = time.time()
    assert run.wait() == 0, "the run failed"
    watcher.join()
    return max(size for at, size in samples if at <= built), samples


def _trainer(launcher: int) -> psutil.Process | None:
    for process in psutil.Process(launcher).children(recursive=True):
        words = process.cmdline()
        if (
            "train" in words
            and "torch.distributed.run" not in words
            and process.environ().get("RANK") == "0"
        ):
            return process
    return None


def _held(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * sum(
        int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) for name in ("RssAnon", "RssShmem")
    )


def by_phase(folder: RunFolder, bare: int, samples: list[tuple[float, int]]) -> dict[str, float]:
    """Returns the bytes of each phase besides `bare`: the largest of an update, else those at its
    end.

    A publish begins with what the update left, which glibc gives back piece by piece, and ends
    without its staging.
    """
    found: dict[str, float] = {}
    for line in folder.timeline_file(0).read_text().splitlines():
        step = json.loads(line)
        for name, begin, end in step["phases"]:
            inside = [size - bare for at, size in samples if begin <= at - step["start"] <= end]
            if inside:
                found[name] = float(
                    max(found.get(name, 0), *inside) if name == "update" else inside[-1]
                )
    return found


if __name__ == "__main__":
    main()
