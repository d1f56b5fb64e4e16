"""Measures calls of megagrpo and of its peers: each in a fork of one process that has imported them.

CPU seconds are those of the process and of its ended children, memory is the growth of the resident
set: both of the call alone, not of imports and inputs. One thread.
"""

import gc
import importlib
import json
import os
import resource
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

# The measured call returns its result, or a function that computes it after the measurement, for
# the comparison with megagrpo's; and notes.
Call = Callable[[], tuple[object, dict[str, object]]]

OURS = "megagrpo"
PACKAGES = {"verl": "verl", "TRL": "trl", "slime": ""}  # slime is in no index: its code's way
PRELOADED = {
    OURS: (
        "megagrpo.algo.advantage",
        "megagrpo.algo.logprob",
        "megagrpo.batching.batch",
        "megagrpo.batching.microbatch",
        "megagrpo.data.prompts",
        "megagrpo.rewards.graders.math",
        "megagrpo.rollout.generation",
    ),
    "verl": (
        "verl.trainer.ppo.core_algos",
        "verl.trainer.config",
        "verl.utils.seqlen_balancing",
        "verl.workers.utils.losses",
        "verl.workers.utils.padding",
        "verl.experimental.agent_loop.agent_loop",
        "verl.utils.dataset.rl_dataset",
        "verl.utils.reward_score.math_verify",
    ),
    "TRL": ("trl.trainer.grpo_trainer", "trl.rewards"),
}


@dataclass
class Case:
    """One side of an item. prepare: makes the inputs and returns the call."""

    item: str
    side: str  # megagrpo, or a peer; a space and a remark may follow
    prepare: Callable[[], Call]

    @property
    def peer(self) -> str:
        return self.side.split(" ")[0]


@dataclass
class Measured:
    """The least of each figure over the repeats of one side."""

    item: str
    side: str
    version: str
    seconds: float = float("nan")
    megabytes: float = float("nan")
    repeats: int = 0
    difference: float | None = None  # the largest, from megagrpo's values
    notes: dict[str, object] = field(default_factory=dict)
    problem: str = ""  # why there is no figure


class Cases(list[Case]):
    """The cases of a file, in its order."""

    def add(self, item: str, side: str) -> Callable[[Callable[[], Call]], Callable[[], Call]]:
        """Returns the decorator that adds a function as a case."""

        def added(prepare: Callable[[], Call]) -> Callable[[], Call]:
            self.append(Case(item, side, prepare))
            return prepare

        return added


def versions(commit: str) -> dict[str, str]:
    """Returns the version of each side that is here."""
    found = {OURS: commit, "slime": "0.3.1, its code's way"}
    for peer, package in PACKAGES.items():
        if package:
            try:
                found[peer] = version(package)
            except PackageNotFoundError:
                continue
    return found


def preload(sides: set[str]) -> dict[str, str]:
    """Imports the modules of all sides once, since verl and TRL take up to a minute. Returns the
    problems by module."""
    torch.set_num_threads(1)
    problems = {}
    for side in sorted(sides & PRELOADED.keys()):
        for module in PRELOADED[side]:
            try:
                importlib.import_module(module)
            except Exception as exc:  # a peer's import may raise anything
                problems[module] = f"{type(exc).__name__}: {exc}"
    return problems


def measured(
    cases: list[Case], repeats: int, limit_s: float, known: dict[str, str]
) -> list[Measured]:
    """Measures the sides of one item in turns."""
    rows = [Measured(case.item, case.side, known.get(case.peer, "")) for case in cases]
    values: dict[str, str] = {}
    for _ in range(repeats):
        for case, row in zip(cases, rows, strict=True):
            if case.peer not in known:
                row.problem = f"not measured: {case.peer} is not installed"
            if row.problem:
                continue
            answer = _forked(case, limit_s)
            if "problem" in answer:
                row.problem = f"not measured: {answer['problem']}"
                continue
            row.repeats += 1
            row.seconds = float(np.nanmin([row.seconds, answer["seconds"]]))
            row.megabytes = float(np.nanmin([row.megabytes, answer["megabytes"]]))
            row.notes = answer["notes"]
            values.setdefault(case.side, answer["values"])
    ours = values.get(OURS, "")
    for row in rows:
        theirs = values.get(row.side, "")
        if row.side != OURS and ours and theirs:
            a, b = np.load(ours), np.load(theirs)
            row.difference = float(np.abs(a - b).max()) if a.shape == b.shape else float("nan")
            if row.item.startswith("grading"):
                row.notes["disagree"] = int((a != b).sum())
                row.notes["differences"] = np.flatnonzero(a != b).tolist()
    return rows


def _memory(what: str) -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(what))


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _measure(case: Case) -> dict[str, object]:
    call = case.prepare()
    gc.collect()
    gc.freeze()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    start = _cpu_seconds()
    result, notes = call()
    seconds = _cpu_seconds() - start
    megabytes = (_memory("VmHWM") - before) / 1e6
    if callable(result):
        result = result()
    saved = ""
    if result is not None:
        if isinstance(result, torch.Tensor):
            result = result.detach().numpy()
        saved = str(Path(tempfile.mkdtemp()) / "values.npy")
        np.save(saved, np.asarray(result, np.float64))
    return {"seconds": seconds, "megabytes": megabytes, "notes": notes, "values": saved}


def _end_after(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(1)


def _forked(case: Case, limit_s: float) -> dict:
    """Measures in a fork of this process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        # a thread, because graders use alarm()
        threading.Thread(target=_end_after, args=(limit_s,), daemon=True).start()
        try:
            answer = _measure(case)
        except BaseException as exc:
            traceback.print_exc()
            answer = {"problem": f"{type(exc).__name__}: {exc}"[:200]}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"problem": f"ended, or more than {limit_s:.0f} s"}
