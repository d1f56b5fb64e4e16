"""Memory by phase of a colocated run of the 135M model: what `check` and `plan` say against what its processes hold.

    python bench/colocated_memory.py [--steps 3]

On a CPU nothing is released and no context exists, so that the trainer is compared: parameters, gradients and
optimiser, and what each phase adds to them, with the unshared bytes of its process less those before it built the
model. Writes bench/results/colocated_memory.*
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from common import ROOT, call_megagrpo, prepare, provenance, write_results
from learning import _write_config

from megagrpo.config.load import load_config
from megagrpo.families.table import read_architecture
from megagrpo.planning.explain import _trainer_side
from megagrpo.system.environment import child_environment
from megagrpo.system.run_folder import RunFolder

SHARED = ["rollout.colocate=true", "weights.transport=ipc", "eval=null", "actor.threads=1"]
PHASES = ("rollout", "logprobs", "update", "publish")
LOOK_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "colocated_memory")
    args = parser.parse_args()
    config, settings = args.folder / "run.yaml", [*SHARED, f"train.num_steps={args.steps}"]
    args.folder.mkdir(parents=True, exist_ok=True)
    _write_config("smollm2", config, {"runs/smollm2": str(args.folder / "run")})
    prepare(config, "smollm2", settings)
    call_megagrpo("sft", config, [*settings, "sft.num_steps=1"])
    bare, samples = watch(config, settings)
    experiment = load_config(config, settings)
    side = _trainer_side(experiment, read_architecture(Path(experiment.model.path)), experiment.actor)
    measured = by_phase(RunFolder(Path(experiment.output_dir)), bare, samples)
    lines = []
    for phase in (phase for phase in PHASES if measured.get(phase)):  # one update of a step needs no old log-probs
        planned, found = side.phases[phase].total, measured[phase]
        lines.append([phase, f"{planned / 1e9:.2f}", f"{found / 1e9:.2f}", f"{found / planned:.2f}"])
    data = {**provenance(), "planned": {p: side.phases[p].parts for p in PHASES}, "measured": measured}
    header = ["phase", "planned trainer, GB", "measured, GB", "measured / planned"]
    write_results("colocated_memory", data, header, lines)


def watch(config: Path, settings: list[str]) -> tuple[int, list[tuple[float, int]]]:
    """Runs the experiment. Returns its trainer's unshared bytes without a model, and (time, bytes) at any time."""
    words = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-W", "ignore", "-m", "megagrpo.cli", "run", str(config), *words]
    run = subprocess.Popen(command, cwd=ROOT, env=child_environment(), stdout=subprocess.PIPE, text=True)
    samples: list[tuple[float, int]] = []

    def look() -> None:
        trainer = None
        while run.poll() is None:
            try:
                trainer = trainer or _trainer(run.pid)
                if trainer is not None:
                    samples.append((time.time(), trainer.memory_full_info().uss))
            except psutil.NoSuchProcess:
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
        if "train" in words and "torch.distributed.run" not in words and process.environ().get("RANK") == "0":
            return process
    return None


def by_phase(folder: RunFolder, bare: int, samples: list[tuple[float, int]]) -> dict[str, float]:
    """Returns the largest bytes of each phase besides `bare`."""
    most: dict[str, float] = {}
    for line in folder.timeline_file(0).read_text().splitlines():
        step = json.loads(line)
        for name, begin, end in step["phases"]:
            inside = [size - bare for at, size in samples if begin <= at - step["start"] <= end]
            most[name] = max([most.get(name, 0.0), *map(float, inside)])
    return most


if __name__ == "__main__":
    main()
