"""Kills, hangs or starves every part of a run in turn: the run must be the one that nobody
disturbed.

    python bench/faults.py [--only NAME ...] [--max-staleness N] [--folder FOLDER]

Two trainer ranks, one engine, the tiny model, a deterministic engine, a checkpoint at every step.
One run is left alone; in the other, faults strike one after the other, each in a step of its own,
from outside: signals by process id, at moments read from logs. For the moments inside an update and
inside a transfer of weights, a file beside the experiment asks the rank to kill itself or the
engine (bench/fault_moments.py). A launcher that is killed, or that ends because the disk of its
checkpoints is full, is started again, as a user would. The network is slow when the engine's server
is stopped for nine tenths of the time. Writes bench/results/faults.{json,md}. Root is needed for
the full disk (a small tmpfs is mounted).

With --max-staleness N the run samples ahead (weights.in_flight: drain). An engine that died then
comes back with the weights of today, so that what it samples again is newer than in the other run:
not the trajectory is compared but the bound, that no group is lost or trained on twice, and their
order. Writes bench/results/faults_ahead.{json,md}.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from common import provenance, write_results
from dispatched import dispatched, not_once, sampling_ahead

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("e2e", "cluster")]
from ray_nodes import RayNodes  # noqa: E402
from run_megagrpo import (  # noqa: E402
    REPEATED,
    Job,
    assert_same_run,
    engine,
    make_inputs,
    megagrpo,
    merged,
    metrics,
    rollouts,
    trainer,
    write_experiment,
)

from megagrpo.rollout.control import find_service  # noqa: E402
from megagrpo.system.processes import is_live  # noqa: E402

SAMPLES = 32  # of a step
STEPS_A_FAULT = 2
_NAME_CHARACTERS = 15  # of a process, in Linux
REWARD_TIMEOUT_S, HEALTH_TIMEOUT_S, LIMIT_S = 3.0, 20.0, 900.0
RANDOM_S = 8.0  # a step and more
SLOW_S = 8.0  # of a slow network, less than an engine may be silent
PASSING_STEPS = 30  # the most that pass while the network is slow and before a random moment
STOPPED_S = 0.45, 0.05  # its server is stopped, and goes on
DISK_MB = 256  # of checkpoints
SETTINGS = {
    "rollout": {
        "deterministic": True,
        # tells from outside where an engine is
        "sglang": {"log_level_http": "info", "decode_log_interval": 1},
        "health_timeout_s": HEALTH_TIMEOUT_S,
        "start_timeout_s": LIMIT_S,  # of Ray and engines beside other programs
        "max_restarts": 1000,
    },
    "weights": {"bucket_mb": 0.02},
    "actor": {"max_restarts": 1000},
    "checkpoint": {"every": 1},
    "reward": {"grader": "fault_graders:low_digits", "timeout_s": REWARD_TIMEOUT_S},
}


@dataclass
class Scene:
    """A running experiment as its faults see it; also a context manager that ends it."""

    job: Job
    folder: Path
    _read: tuple[tuple[int, int], int] = ((0, 0), 0)  # the record's age and size, and its last step

    def __enter__(self) -> "Scene":
        return self

    def __exit__(self, *exc_info) -> None:
        self.job.__exit__(*exc_info)

    def start_again(self) -> None:
        self.job = Job("run", self.folder.with_suffix(".yaml"))

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def step(self) -> int:
        """Finished steps."""
        try:
            state = (self.folder / "metrics.jsonl").stat()
            now = state.st_mtime_ns, state.st_size
            if now != self._read[0]:
                steps = (s for s, entry in metrics(self.folder).items() if "loss/total" in entry)
                self._read = now, max(steps, default=0)
            return self._read[1]
        except (OSError, ValueError):  # being written anew
            return -1

    def wait(self, ready, what: str, poll_s: float = 0.05):
        return self.job.wait_for(ready, what, LIMIT_S, poll_s)

    def when(
        self, now: Callable[[str], bool], pid: int, number: signal.Signals = signal.SIGKILL
    ) -> None:
        """Sends a signal when what the engine logs from here on shows that moment.

        The process is stopped first, and goes on when the moment has passed meanwhile.
        """
        log = self.log("engine-0.node-0")
        begin = log.stat().st_size

        def struck() -> bool:
            def is_now() -> bool:
                return now(said_since(log, begin))

            if not is_now():
                return False
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.05)  # what it wrote before
            if is_now():
                os.kill(pid, number)
                return True
            os.kill(pid, signal.SIGCONT)
            return False

        self.wait(struck, now.__name__, poll_s=0.005)

    def process(self, name: str) -> psutil.Process:
        """Of this run, by its name: the one that lives, not one that a fault has ended."""

        def find() -> psutil.Process | None:
            for process in self.job.tree():
                with suppress(psutil.Error):
                    if (
                        is_live(process)
                        and process.name()[:_NAME_CHARACTERS] == name[:_NAME_CHARACTERS]
                    ):
                        return process
            return None

        return self.wait(find, name)


def said_since(log: Path, begin: int) -> str:
    """What a log says from there on."""
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


def idle(log: str) -> bool:
    """All samples are answered, no new weights have come."""
    since = log.rpartition("POST /continue_generation")[2]
    return since.count("POST /generate") >= SAMPLES and "POST /pause_generation" not in since


def prefill(log: str) -> bool:
    since = log.rpartition("POST /continue_generation")[2]
    return "Prefill batch" in since and since.count("POST /generate") < SAMPLES


def decode(log: str) -> bool:
    since = log.rpartition("POST /continue_generation")[2]
    return "Decode batch" in since and since.count("POST /generate") < SAMPLES


def kill_engine(now) -> Callable[[Scene], None]:
    return lambda scene: scene.when(now, engine(scene.folder)["pid"])


def hang_engine(scene: Scene) -> None:
    scene.when(prefill, scene.process("sglang::scheduler").pid, signal.SIGSTOP)


def kill_now(name: str) -> Callable[[Scene], None]:
    return lambda scene: scene.process(name).kill()


def kill_rank(rank: int, now) -> Callable[[Scene], None]:
    return lambda scene: scene.when(now, trainer(scene.job, rank).pid)


def engine_group(scene: Scene) -> int:
    """The process group of the engine's server and its ranks."""
    return scene.wait(
        lambda: (engine(scene.folder) or {"pid": 0})["pid"], "an engine"
    )  # 0 while it starts


def kill_engine_at_random(scene: Scene) -> None:
    time.sleep(random.uniform(0.0, RANDOM_S))
    os.killpg(engine_group(scene), signal.SIGKILL)


def kill_engine_in_transfer(scene: Scene) -> None:
    """While trainer rank 1 sends to it, at a random moment of that."""
    ask("die_in_transfer_1", str(engine_group(scene)))(scene)


def kill_launcher(scene: Scene) -> float:
    """In a rollout; found by all that it started, which ends. The user starts the run again."""
    scene.when(prefill, scene.job.process.pid)
    started = time.monotonic()
    scene.job.kill()
    ended_s = time.monotonic() - started
    scene.start_again()
    return ended_s


def fill_disk(scene: Scene) -> float:
    """The run ends with the reason. The user makes room and starts it again."""
    filling = scene.folder / "checkpoints" / "filling"
    started = time.monotonic()
    with filling.open("ab", buffering=0) as file:
        while scene.job.process.poll() is None:
            with suppress(OSError):  # full: until an old checkpoint is removed
                while True:
                    file.write(bytes(4096))
            assert time.monotonic() - started < LIMIT_S, "a full disk, and the run goes on"
            time.sleep(0.02)
    ended_s = time.monotonic() - started
    done = scene.job.finish()
    assert done.status == 1 and "could not write" in done.stderr, done
    filling.unlink()
    scene.start_again()
    return ended_s


def slow_network(scene: Scene) -> None:
    """Each answer of the engine, and each request, comes late."""
    pid = engine(scene.folder)["pid"]
    for _ in range(int(SLOW_S / sum(STOPPED_S))):
        for number, seconds in zip((signal.SIGSTOP, signal.SIGCONT), STOPPED_S, strict=True):
            os.kill(pid, number)
            time.sleep(seconds)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """For the checkpoints of a run."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def ask(file: str, content: str = "") -> Callable[[Scene], None]:
    """Returns when it has happened."""

    def strike(scene: Scene) -> None:
        asked = scene.folder.parent / file
        written = asked.with_suffix(".new")
        written.write_text(content)
        written.rename(asked)
        scene.wait(lambda: not asked.exists(), file, poll_s=0.005)

    return strike


@dataclass(frozen=True)
class Fault:
    strike: Callable[[Scene], float | None]  # seconds until it was found, where the strike knows
    log: str = ""  # where its discovery is written ...
    sign: str = ""  # ... in these words
    equal: bool = True  # whether the run stays the undisturbed one


ENGINE, TRAINER = ("service", "engine-0 died"), ("trainer", "failed (exitcode")
FAULTS = {
    "engine killed, idle": Fault(kill_engine(idle), *ENGINE),
    "engine killed in prefill": Fault(kill_engine(prefill), *ENGINE),
    "engine killed in decode": Fault(kill_engine(decode), *ENGINE),
    "engine killed in a weight update": Fault(kill_engine_in_transfer, *ENGINE),
    "engine killed at a random moment": Fault(kill_engine_at_random, *ENGINE),
    "engine's scheduler hung (SIGSTOP)": Fault(hang_engine, *ENGINE),
    "trainer rank 1 killed in a rollout": Fault(kill_rank(1, prefill), *TRAINER),
    "trainer rank 0 killed in a publish": Fault(ask("die_in_transfer_0"), *TRAINER),
    "trainer rank 1 killed in the forward": Fault(ask("die_in_forward_1"), *TRAINER),
    "trainer rank 0 killed in the backward": Fault(ask("die_in_backward_0"), *TRAINER),
    "trainer rank 1 killed in the optimizer": Fault(ask("die_in_optimizer_1"), *TRAINER),
    "trainer rank 0 killed in a checkpoint": Fault(ask("die_in_checkpoint_0"), *TRAINER),
    "launcher killed in a rollout, started again": Fault(kill_launcher),
    "disk full at a checkpoint, started again with room": Fault(fill_disk),
    "network slow": Fault(slow_network),
    "reward worker hung": Fault(
        ask("hang_in_reward"), equal=False
    ),  # the last: what follows is another run
}
NODE = "Ray node killed in a rollout"


def strike(scene: Scene, name: str) -> dict:
    """Strikes once and reports what became of it. Seconds count from the fault, samples are those
    of its step."""
    fault, before = FAULTS[name], scene.step()
    log = scene.log(fault.log) if fault.log else None
    begin = log.stat().st_size if log else 0
    detected_s = fault.strike(scene)
    started = time.monotonic() - (detected_s or 0.0)
    # on a busy machine the moment may be missed in the first step
    before = max(before, scene.step())
    if log:
        scene.wait(
            lambda: fault.sign in said_since(log, begin),
            f"{fault.sign} in {log.name}",
            poll_s=0.005,
        )
        detected_s = time.monotonic() - started
    row = {"fault": name, "step": before + 1, "detected_s": detected_s}
    scene.wait(lambda: scene.step() >= before + 1, f"the end of step {before + 1}")
    return row | {"recovered_s": time.monotonic() - started}


def judge(row: dict, folder: Path, reference: Path) -> dict:
    """Compares the step of the fault, and the one after, with the undisturbed run; counts missing
    samples."""
    steps = range(row["step"], row["step"] + STEPS_A_FAULT)
    ours, theirs = (
        [(metrics(run)[s], rollouts(run)[s]) for s in steps] for run in (folder, reference)
    )
    same = all(
        a[1] == b[1] and all(a[0][name] == b[0][name] for name in REPEATED)
        for a, b in zip(ours, theirs, strict=True)
    )
    equal = "yes" if same else "no"
    samples = [sample for group in rollouts(folder)[row["step"]] for sample in group["samples"]]
    unscored = [
        sample["outcome"]["status"] for sample in samples if sample["outcome"]["status"] != "score"
    ]
    if not FAULTS[row["fault"]].equal and equal == "no" and unscored == ["timeout"]:
        equal = "no: its reward is a timeout, which counts for nothing (and is no 0)"
    return row | {"samples_lost": SAMPLES - len(samples), "equal": equal}


def prepare(root: Path, made: Path | None = None) -> None:
    """Makes the folder for runs; the model and the data are those in `made`, or new ones."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    shutil.copy(ROOT / "bench" / "fault_graders.py", root)
    shutil.copy(ROOT / "bench" / "fault_moments.py", root / "sitecustomize.py")
    for name in ("model", "data") if made else ():
        shutil.copytree(made / name, root / name)
    if not made:
        make_inputs(write_experiment(root / "prepared"))


def matrix(root: Path, names: list[str]) -> list[dict]:
    ahead = SETTINGS["rollout"].get("max_staleness", 0)
    # the last fault may find all grades of the steps ahead done
    num_steps = STEPS_A_FAULT * (len(names) + ahead) + PASSING_STEPS + 1
    reference, folder = root / "undisturbed", root / "disturbed"
    done = megagrpo(
        "run",
        write_experiment(reference, **SETTINGS, train={"num_steps": num_steps}),
        timeout_s=LIMIT_S * 4,
    )
    assert done.status == 0, done.stderr
    rows: list[dict] = []
    config = write_experiment(folder, **SETTINGS, train={"num_steps": num_steps})
    with (
        small_disk(folder / "checkpoints"),
        Scene(Job("run", config), folder) as scene,
    ):
        for name in names:
            untouched = rows[-1]["step"] + STEPS_A_FAULT - 1 if rows else 1
            scene.wait(
                lambda step=untouched: scene.step() >= step,
                f"the step before: {name}",
            )
            rows.append(strike(scene, name))
            print(json.dumps(rows[-1]), flush=True)
        done = scene.job.finish(LIMIT_S * 4)
    assert done.status == 0, done.stderr
    (prompts, lag), (expected, _) = dispatched(folder), dispatched(reference)
    epoch = (root / "data" / "train.jsonl").read_text().count("\n")
    assert prompts == expected and not not_once(prompts, epoch), "groups of another order, or twice"
    print(f"{len(prompts)} groups, each once, in their order; largest lag {lag}")
    assert lag <= ahead
    return [judge(row, folder, reference) for row in rows]


def ray_node(root: Path) -> dict:
    """Kills all processes of one of two Ray nodes with an engine each, in a rollout; another joins
    after the step."""
    engines = SETTINGS["rollout"] | {"num_engines": 2, "min_healthy_engines": 1}
    num_steps = 2 * STEPS_A_FAULT + 1
    sections = SETTINGS | {"rollout": engines, "train": {"num_steps": num_steps}}
    reference, folder = root / "nodes-undisturbed", root / "nodes-disturbed"
    _on_two_nodes(write_experiment(reference, **sections), lambda scene, nodes: {})
    row = _on_two_nodes(write_experiment(folder, **sections), _lose_node)
    assert_same_run(folder, reference, num_steps)
    samples = sum(len(group["samples"]) for group in rollouts(folder)[row["step"]])
    return row | {"samples_lost": SAMPLES - samples, "equal": "yes"}


def _on_two_nodes(config: Path, strike: Callable[[Scene, RayNodes], dict]) -> dict:
    """Serve on two nodes, train to the end; returns what `strike` made of it."""
    temporary = Path(
        tempfile.mkdtemp(prefix="mgr-")
    )  # short: Unix socket paths end at 107 characters
    try:
        with RayNodes(temporary) as nodes:
            nodes.start(1)
            nodes.start(2)
            with (
                Job("serve", config, "--ray-address", nodes.address, env=nodes.token) as service,
                Job("train", config) as job,
            ):
                row = strike(Scene(job, config.with_suffix("")), nodes)
                done = job.finish(LIMIT_S)
                service.signal(signal.SIGTERM)
                service.finish(LIMIT_S)
        assert done.status == 0, done.stderr
        return row
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _lose_node(scene: Scene, nodes: RayNodes) -> dict:
    scene.wait(lambda: scene.step() >= 1, "step 1")
    control = find_service(scene.folder)
    lost = next(e.id for e in control.status().engines if e.pid in nodes.pids(2))
    log = scene.log(f"{lost}.node-0")

    def generates() -> bool:
        since = log.read_text(errors="replace").rpartition("POST /continue_generation")[2]
        return "Prefill batch" in since and since.count("POST /generate") < SAMPLES // 4

    def noticed() -> bool:
        return next(e.state for e in control.status().engines if e.id == lost) != "ready"

    scene.wait(generates, "a rollout")
    step, started = scene.step() + 1, time.monotonic()
    nodes.kill(2)
    scene.wait(noticed, "the loss of the node")
    detected = time.monotonic() - started
    scene.wait(lambda: scene.step() >= step, "the end of the step")
    recovered = time.monotonic() - started
    nodes.start(3)
    return {"fault": NODE, "step": step, "detected_s": detected, "recovered_s": recovered}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*FAULTS, NODE], default=[*FAULTS, NODE])
    parser.add_argument("--max-staleness", type=int, default=0, help="versions")
    parser.add_argument(
        "--folder", type=lambda path: Path(path).resolve(), default=ROOT / "runs" / "faults"
    )
    args = parser.parse_args()
    if args.max_staleness:
        SETTINGS.update(merged(SETTINGS, sampling_ahead(args.max_staleness, "drain")))
    prepare(args.folder)
    rows = (
        matrix(args.folder, names)
        if (names := [name for name in FAULTS if name in args.only])
        else []
    )
    if NODE in args.only:
        rows.append(ray_node(args.folder))
    header = ("fault", "detected in s", "recovered in s", "samples lost")
    lines = [
        (
            r["fault"],
            "-" if r["detected_s"] is None else f"{r['detected_s']:.1f}",
            f"{r['recovered_s']:.1f}",
            str(r["samples_lost"]),
        )
        for r in rows
    ]
    if not args.max_staleness:
        header = (*header, "trajectory equal")
        lines = [(*line, r["equal"]) for line, r in zip(lines, rows, strict=True)]
    name = "faults_ahead" if args.max_staleness else "faults"
    write_results(name, provenance() | {"load": os.getloadavg(), "rows": rows}, header, lines)


if __name__ == "__main__":
    main()
