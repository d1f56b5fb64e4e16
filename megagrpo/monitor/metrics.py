"""What is measured in a step: collected per rank, reduced once, written to TensorBoard and to files in the run folder.

Entries are numbered by finished steps, which is the weight version: entry 0 holds what was measured before the first
update, entry n what was measured while making weights n and of them. Names are `group/name`, lower case.
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from megagrpo.config.schema import LogConfig
from megagrpo.run_folder import write_json_lines
from megagrpo.types import RolloutGroup

_NAME = re.compile(r"[a-z0-9_]+/[a-z0-9_@]+")

# Phases that do the work of training. What is left of a step is the cost of the framework itself.
WORK_PHASES = frozenset({"rollout", "logprobs", "update", "publish", "evaluate", "checkpoint"})


class Metrics:
    """The values of one step on this rank. How ranks are combined is said where a value is added.

    Values are numbers or one-element tensors; tensors stay on their device until `reduced`, so adding never waits for a
    GPU. The same name may be added many times (micro-batches) but always with the same method.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float | Tensor] = {}
        self._largest: dict[str, float | Tensor] = {}
        self._kinds: dict[str, str] = {}

    def add_mean(self, name: str, numerator: float | Tensor, denominator: float | Tensor = 1.0) -> None:
        """Sum of numerators over sum of denominators, over calls and ranks. Left out when the denominators sum to 0."""
        self._add(self._sums, name, "mean", ("/numerator", numerator), ("/denominator", denominator))

    def add_sum(self, name: str, value: float | Tensor) -> None:
        """Sum over calls and ranks."""
        self._add(self._sums, name, "sum", ("", value))

    def add_max(self, name: str, value: float | Tensor) -> None:
        """Largest over calls and ranks. NaN counts as infinite: all-reduces drop a NaN, and it must not be hidden."""
        self._claim(name, "max")
        value = torch.nan_to_num(
            torch.as_tensor(_detached(value), dtype=torch.float64), nan=torch.inf, posinf=torch.inf, neginf=-torch.inf
        )
        old = self._largest.get(name)
        self._largest[name] = value if old is None else torch.maximum(value, old.to(value.device))

    def add_rate(self, name: str, amount: float | Tensor, seconds: float) -> None:
        """Amount of all ranks per second of the slowest: throughput of ranks that work at the same time. Added once a step."""
        assert name not in self._kinds, f"metric {name}: a rate is added once a step"
        self._add(self._sums, name, "rate", ("/amount", amount))
        self._largest[name] = seconds

    def _claim(self, name: str, kind: str) -> None:
        assert _NAME.fullmatch(name), f"metric name {name!r} is not group/name in lower case"
        old = self._kinds.setdefault(name, kind)
        assert old == kind, f"metric {name} was added as {old} and now as {kind}"

    def _add(self, into: dict, name: str, kind: str, *parts: tuple[str, float | Tensor]) -> None:
        self._claim(name, kind)
        for suffix, value in parts:
            into[name + suffix] = into.get(name + suffix, 0.0) + _detached(value)

    def reduced(self, reduce: Callable[[Tensor, str], Tensor], device: torch.device | str = "cpu") -> dict[str, float]:
        """The step's values over all ranks, in name order. Collective: every rank must have added the same names.

        `reduce(tensor, op)`, op "sum" or "max", all-reduces a float64 vector (Mesh.reduce). Three small collectives.
        """
        self._check_same_names(reduce, device)
        sums = _reduce_values(self._sums, reduce, "sum", device)
        largest = _reduce_values(self._largest, reduce, "max", device)
        out = {}
        for name, kind in sorted(self._kinds.items()):
            match kind:
                case "mean" if sums[name + "/denominator"] != 0:
                    out[name] = sums[name + "/numerator"] / sums[name + "/denominator"]
                case "sum":
                    out[name] = sums[name]
                case "rate" if largest[name] > 0:
                    out[name] = sums[name + "/amount"] / largest[name]
                case "max":
                    out[name] = largest[name]
        return out

    def _check_same_names(self, reduce: Callable[[Tensor, str], Tensor], device: torch.device | str) -> None:
        """Vectors of unequal length would hang or corrupt the reduction, so names are compared first, by hash."""
        text = json.dumps(sorted(self._kinds.items()))
        mine = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")  # 48 bits: exact in float64
        largest, negated_smallest = reduce(
            torch.tensor([mine, -mine], dtype=torch.float64, device=device), "max"
        ).tolist()
        assert largest == -negated_smallest, f"ranks measured different metrics; this rank: {text}"


def _detached(value: float | Tensor) -> float | Tensor:
    return value.detach().double() if isinstance(value, Tensor) else value


def _reduce_values(values: dict[str, float | Tensor], reduce, op: str, device: torch.device | str) -> dict[str, float]:
    names = sorted(values)
    if not names:
        return {}
    vector = torch.stack([torch.as_tensor(values[n], dtype=torch.float64, device=device).reshape(()) for n in names])
    return dict(zip(names, reduce(vector, op).tolist(), strict=True))


class StepTimer:
    """Wall seconds of one step and of its phases; phases do not nest. Starts when made."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, on_phase: Callable[[str], None] = lambda name: None
    ) -> None:
        self._clock, self._on_phase = clock, on_phase
        self._start = clock()
        self._open: str | None = None
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; the same name again adds up."""
        assert self._open is None, f"phase {name} inside phase {self._open}: its seconds would count twice"
        self._open, start = name, self._clock()
        self._on_phase(name)
        try:
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # else the kernels of this phase are billed to the next one
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - start
            self._open = None
            self._on_phase(f"what follows {name}")

    def record(self, metrics: Metrics, num_tokens: float | Tensor) -> None:
        """Add time/<phase>_s and time/step_s (of the slowest data-parallel rank), time/framework_fraction and perf/tokens_per_s.

        `num_tokens`: this data-parallel rank's tokens of the step, prompts included.
        """
        step = self._clock() - self._start
        for name, seconds in self.seconds.items():
            metrics.add_max(f"time/{name}_s", seconds)
        metrics.add_max("time/step_s", step)
        metrics.add_mean("time/framework_fraction", step - sum(self.seconds.get(n, 0.0) for n in WORK_PHASES), step)
        metrics.add_rate("perf/tokens_per_s", num_tokens, step)


class StepLog:
    """The run folder's record, written by the main rank alone: metrics.jsonl, tensorboard/, rollouts/step_000012.jsonl.

    A run that starts at `start_step` finished steps (0: from the beginning) drops the entries of later steps, which it
    makes again; beginning anew drops all.
    """

    def __init__(self, run_dir: Path, config: LogConfig, start_step: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / "metrics.jsonl"
        self._rollouts = run_dir / "rollouts" if config.rollouts else None
        last_kept = start_step if start_step > 0 else -1
        kept = [entry for entry in read_metrics(run_dir) if entry["step"] <= last_kept] if self._path.exists() else []
        write_json_lines(self._path, kept)
        for path in (run_dir / "rollouts").glob("step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) > last_kept:
                path.unlink()
        self._board = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # seconds of import that only the main rank pays

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=last_kept + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append an entry; several of one step are read as one. A value that is not finite is written as null."""
        entry = {"step": step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def write_rollouts(self, step: int, groups: Iterable[RolloutGroup]) -> None:
        """One line per prompt: its text and answer, and every sample with its reward, outcome and finish reason."""
        if self._rollouts is not None:
            self._rollouts.mkdir(exist_ok=True)
            write_json_lines(self._rollouts / f"step_{step:06d}.jsonl", map(_rollout_record, groups))

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def _rollout_record(group: RolloutGroup) -> dict:
    samples = [
        {
            "text": sample.text,
            "reward": outcome.value if outcome.ok else None,
            "outcome": asdict(outcome),
            "finish_reason": sample.finish_reason,
            "num_tokens": len(sample.token_ids),
            "weight_version": sample.weight_version,
        }
        for sample, outcome in zip(group.samples, group.outcomes, strict=True)
    ]
    prompt = group.prompt
    return {
        "group_id": group.group_id,
        "prompt_id": prompt.id,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "samples": samples,
    }


def read_metrics(run_dir: Path) -> list[dict]:
    """The entries of run_dir/metrics.jsonl by step, each {"step": int, name: float | None}; lines of one step are merged.

    A last line cut short by a crash is ignored. Raises ValueError when there is no such file or another line is broken.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a run folder has one after its first step")
    lines = path.read_text(encoding="utf-8").split("\n")
    entries: dict[int, dict] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # no newline after it: the writer was killed
                break
            raise ValueError(f"{path}:{number}: not a JSON line: {error}") from None
        entries.setdefault(entry["step"], {}).update(entry)
    return [entries[step] for step in sorted(entries)]
