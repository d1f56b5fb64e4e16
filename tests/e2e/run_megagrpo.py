"""The command line as a user sees it: an experiment of its own, a finished command, or one that is still running."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import yaml

from megagrpo.checkpoint.folder import latest, step_of
from megagrpo.monitor.rollout_log import read_rollouts
from megagrpo.monitor.step_log import read_metrics
from megagrpo.rollout.control import ServiceUnreachable, find_service
from megagrpo.system.environment import child_environment
from megagrpo.system.processes import is_live, process_tree, stop_tree
from megagrpo.system.run_folder import RunFolder

REPEATED = (
    "loss/total", "loss/policy", "reward/mean", "reward/std", "optim/grad_norm", "policy/entropy",
    "mismatch/logprob_abs_mean",
)  # fmt: skip
# What write_experiment is told for the session's undisturbed run and for those that are compared
# with it. two passes of two updates a step: what resumes is the order of groups in the second, too
LONG_RUN = {
    "train": {"num_steps": 10, "num_updates_per_step": 2, "num_epochs_per_step": 2},
    "rollout": {"deterministic": True},
    "checkpoint": {"every": 1, "keep": 20},
}
_TORCHVISION_HOOK = str(Path(__file__).parents[2] / "megagrpo" / "cpu" / "engine")  # see its sitecustomize

_FORKS = "megagrpo.cpu.ranks"

GRADERS = '''
import time
from pathlib import Path

def low_digits(text, answer):
    """Something that a random model gets in part: the share of small digits."""
    return sum(c in "01234" for c in text) / max(len(text), 1)

def sometimes_bad(text, answer):
    """Raises, hangs, returns NaN or a score, by the response; raises whatever the response when a file says so."""
    kind = sum(map(ord, text)) % 8
    if kind == 0 or Path(__file__).with_name("all_bad").exists():
        raise KeyError("no such column")
    if kind == 1:
        time.sleep(3600)
    return float("nan") if kind == 2 else 5.0

class SaysItAgain:
    """An environment without a reward: says a turn that ends with ">" again; any other turn is the last."""
    def __init__(self, row, seed): pass
    def reset(self): return None
    def step(self, text): return (text, 0.0, False) if text.endswith(">") else (None, 0.0, True)
'''


RECIPE = {
    "model": {
        "hidden_size": 64, "num_layers": 2, "head_dim": 16, "ffn_size": 96, "num_experts": 4, "expert_ffn_size": 48,
    },
    "dataset": {"kind": "arithmetic", "num_sft": 64, "num_train": 400, "num_eval": 16},
}  # fmt: skip
PREPARE = Path(__file__).parents[2] / "examples" / "laptop" / "prepare.py"


def prepared(folder: Path, graders: str = GRADERS) -> Path:
    """The folder, with the tiny model and data, and graders for runs on other hosts; experiments lie beside them."""
    (folder / "graders_of_tests.py").write_text(graders)
    make_inputs(write_experiment(folder / "prepared"))
    return folder


def make_inputs(experiment: Path, **sections) -> None:
    """Makes the experiment's model and data by RECIPE; sections are merged over it."""
    recipe = experiment.with_suffix(".recipe")
    recipe.write_text(yaml.safe_dump(merged(RECIPE, sections)))
    subprocess.run([sys.executable, "-W", "ignore", str(PREPARE), str(experiment), "--recipe", str(recipe)], check=True)


def experiment(folder: Path, **sections) -> dict:
    """A tiny Qwen3-MoE, two trainer ranks, 8 prompts x 4 samples; sections are merged over it, key by key."""
    base = {
        "name": folder.name,
        "output_dir": str(folder),
        "model": {"path": str(folder.parent / "model")},
        "data": {"path": str(folder.parent / "data" / "train.jsonl"), "max_prompt_tokens": 8},
        "sampling": {"max_response_tokens": 8},
        "reward": {"grader": "graders_of_tests:low_digits", "workers": 1},
        "train": {"num_steps": 2, "num_prompts_per_step": 8, "group_size": 4},
        "actor": {"world_size": 2, "parallel": {"ep": 2}, "optimizer": {"lr": 1e-3}, "deadline_s": 600},
        "rollout": {"start_timeout_s": 240, "step_timeout_s": 240, "max_running_requests": 64},
        "weights": {"timeout_s": 300},
        "log": {"tensorboard": False},
    }
    sampling = sections.get("sampling", {})
    if "agent" in sampling or sampling.get("environment", {}).get("rewards", "environment" in sampling):
        del base["reward"]
    return merged(base, sections)


def merged(below: dict, above: dict) -> dict:
    """Sections of `above` over those of `below`, key by key."""
    out = dict(below)
    for key, value in above.items():
        out[key] = merged(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
    return out


def write_experiment(folder: Path, **sections) -> Path:
    """The experiment's YAML beside its run folder, which is not made."""
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(experiment(folder, **sections)))
    return path


@dataclass(frozen=True)
class Finished:
    """A command that ended: what its user saw."""

    status: int
    stdout: str
    stderr: str

    @property
    def message(self) -> list[str]:
        """The lines of standard error."""
        return self.stderr.splitlines()


def megagrpo(*arguments: str | Path, timeout_s: float = 300.0) -> Finished:
    """Run `megagrpo ARGUMENTS` to its end, and check that it leaves no process behind."""
    return Job(*arguments).finish(timeout_s)


def succeed(*arguments: str | Path, timeout_s: float = 500.0) -> Finished:
    """The same; it must end without an error."""
    return Job(*arguments).succeed(timeout_s)


def run_experiment(folder: Path, timeout_s: float = 500.0, **sections) -> Finished:
    """`megagrpo run` of the experiment into `folder`, without an error."""
    return succeed("run", write_experiment(folder, **sections), timeout_s=timeout_s)


class Job:
    """`megagrpo ARGUMENTS` running; also a context manager that ends it and everything that it started."""

    def __init__(self, *arguments: str | Path, env: dict[str, str] | None = None):
        folder = Path(str(arguments[1])).parent if len(arguments) > 1 else Path.cwd()
        self.folder = Path(str(arguments[1])).with_suffix("") if len(arguments) > 1 else folder  # of the run
        graders = folder / "graders_of_tests.py"
        if not graders.exists():
            graders.write_text(GRADERS)
        self._start, self._tree = time.monotonic(), {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megagrpo.cli", *map(str, arguments)],
            env=child_environment(env, [str(folder)]),
            cwd=folder,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            pipesize=2**20,  # nobody reads before the end: lines of a thousand steps
        )  # fmt: skip

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exc_info) -> None:
        for process in self.tree():
            if is_live(process):
                stop_tree(process.pid, 0.0)
        self.process.communicate()

    def tree(self) -> list[psutil.Process]:
        """Every process seen so far below this command."""
        for process in process_tree(self.process.pid):
            self._tree[process.pid] = process
        return list(self._tree.values())

    def finish(self, timeout_s: float = 300.0) -> Finished:
        with self:
            try:
                stdout, stderr = self._communicate(timeout_s)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"no end after {timeout_s} s") from None
            left = self.left_behind()
        assert not left, f"left behind: {left}"
        return Finished(self.process.returncode, stdout, stderr)

    def succeed(self, timeout_s: float = 500.0) -> Finished:
        done = self.finish(timeout_s)
        assert done.status == 0, done.stdout + done.stderr
        return done

    def _communicate(self, timeout_s: float) -> tuple[str, str]:
        """Wait, and look meanwhile at what it starts."""
        while True:
            try:
                return self.process.communicate(timeout=0.5)
            except subprocess.TimeoutExpired:
                self.tree()
                if time.monotonic() - self._start > timeout_s:
                    raise

    def left_behind(self, within_s: float = 60.0) -> list[str]:
        """Processes of this command that still run after it has ended."""
        deadline = time.monotonic() + within_s
        while (left := [p for p in self._tree.values() if is_live(p)]) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [f"{p.pid} {' '.join(p.cmdline())[:120]}" for p in left]

    def wait_for_step(self, step: int, timeout_s: float = 400.0) -> None:
        """Until the samples of this step of the run are written."""
        done = self.folder / "rollouts" / f"step_{step:06}.replica_0.jsonl"
        self.wait_for(done.exists, f"step {step}", timeout_s)

    def wait_for(self, ready, what: str, timeout_s: float = 240.0, poll_s: float = 0.02):
        """The first true value of ready(); the command must still be running until then."""
        deadline, looked = time.monotonic() + timeout_s, 0.0
        while not (value := ready()):
            if time.monotonic() > looked + 0.5:
                self.tree()
                looked = time.monotonic()
            assert self.process.poll() is None, f"ended before {what}: {self.process.communicate()}"
            assert time.monotonic() < deadline, f"no {what} in {timeout_s} s"
            time.sleep(poll_s)
        return value

    def kill(self) -> None:
        """The launcher dies without a chance to clean up; all that it started ends with it."""
        self.tree()
        self.signal(signal.SIGKILL)
        self.process.wait()
        assert not (left := self.left_behind()), left

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


def trainer(job: Job, rank: int) -> psutil.Process | None:
    """The process of a trainer rank; None while there is none."""
    return trainer_below(job.process.pid, rank)


def trainer_below(pid: int, rank: int) -> psutil.Process | None:
    """The same, of the launcher with this process id."""
    forked = []
    for process in process_tree(pid):
        try:
            words = process.cmdline()
            if _FORKS in words:
                forked += [] if is_parent_of_ranks(process) else [process]
            elif "train" in words and process.environ().get("RANK") == str(rank):
                return process
        except psutil.NoSuchProcess:
            continue
    return dict(enumerate(sorted(forked, key=lambda process: process.pid))).get(rank)


def is_parent_of_ranks(process: psutil.Process) -> bool:
    """Whether ranks on a CPU fork from this process, in their order, rather than that it is one of them."""
    parent = process.parent()
    return _FORKS in process.cmdline() and (parent is None or _FORKS not in parent.cmdline())


def killed_and_run_again(experiment: Path) -> None:
    """A run of which first a trainer dies, then everything, and which then goes on to its end."""
    with Job("run", experiment) as job:
        job.wait_for_step(1)
        trainer(job, 1).kill()
        job.wait_for_step(3)  # the end of the block kills everything
    succeed("run", experiment)


def reached_before(folder: Path, end: int, middle: int) -> int:
    """The step of the last checkpoint. One that a slow observer found at the end or behind it goes
    back to the middle, as with a user who deletes later checkpoints."""
    last = int(latest(folder / "checkpoints").name.removeprefix("step_"))
    if last < end:
        return last
    for path in (folder / "checkpoints").glob("step_*"):
        if int(path.name.removeprefix("step_")[:6]) > middle:
            shutil.rmtree(path)
    (folder / "last_checkpoint").unlink()
    return middle


def assert_killed_run_is_the_same(
    folder: Path, reference: Path, num_steps: int, kill_after: int, middle: int, **sections
) -> None:
    """An experiment that is killed once step `kill_after` is saved, with everything that it started,
    and run again, has the bits of an undisturbed one. middle: as in reached_before."""
    config = write_experiment(folder, **sections)
    saved = folder / "checkpoints" / f"step_{kill_after:06d}"
    with Job("run", config, "--set", "train.num_steps=500") as job:
        job.wait_for(saved.exists, f"step {kill_after}", 400)
        job.kill()
    reached_before(folder, num_steps, middle)
    succeed("run", config)
    assert_same_run(folder, reference, num_steps)


def engine(run_dir: Path) -> dict | None:
    """The first engine as the service of this run describes it; None while there is no service."""
    try:
        return asdict(find_service(run_dir).status().engines[0])
    except (ServiceUnreachable, ValueError, IndexError):
        return None


def metrics(run_dir: Path) -> dict[int, dict]:
    """metrics.jsonl by step."""
    return {entry["step"]: entry for entry in read_metrics(RunFolder(run_dir))}


def rollouts(run_dir: Path) -> dict[int, list[dict]]:
    """The samples of every step."""
    files = RunFolder(run_dir).rollout_files()
    return {step: list(read_rollouts(of_step.values())) for step, of_step in files.items()}


def assert_agrees(folder: Path) -> None:
    """In float32 the trainers' log-probabilities are the engine's but for rounding, at every step."""
    assert all(entry["mismatch/logprob_abs_mean"] <= 1e-5 for step, entry in metrics(folder).items() if step)


def step_after_saved(folder: Path) -> int:
    """The first step that the run's latest checkpoint does not have."""
    saved = latest(folder / "checkpoints")
    return 1 if saved is None else step_of(saved) + 1


def assert_same_run(folder: Path, reference: Path, num_steps: int) -> None:
    """Losses, rewards and responses of the first `num_steps` steps are the same bits."""
    ours, theirs = metrics(folder), metrics(reference)
    assert sorted(ours)[-1] == num_steps
    for step in range(1, num_steps + 1):
        pairs = {name: (ours[step][name], theirs[step][name]) for name in REPEATED}
        differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        assert not differing, f"step {step}: {differing}"
    ours, theirs = rollouts(folder), rollouts(reference)
    assert {s: ours[s] for s in range(1, num_steps + 1)} == {s: theirs[s] for s in range(1, num_steps + 1)}


def transformers_accepts(folder: Path, prompt: str = "12+3=") -> dict:
    """Load an exported folder with Hugging Face transformers alone, in a process of its own; returns what it found."""
    program = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
ids = AutoTokenizer.from_pretrained(sys.argv[1])(sys.argv[2], return_tensors="pt")["input_ids"]
print(json.dumps({
    "wrong": [k for key in ("missing_keys", "unexpected_keys", "mismatched_keys") for k in info[key]],
    "finite": bool(model(ids).logits.isfinite().all()),
}))
"""
    command, env = ([sys.executable, "-c", program, str(folder), prompt], child_environment(None, [_TORCHVISION_HOOK]))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
