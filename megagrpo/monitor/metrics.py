"""Collects the metrics of a step, reduced once over all ranks, and the seconds of its phases.

Names are `group/name`, lower case.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

Reduce = Callable[[Tensor, str], Tensor]
_NAME = re.compile(r"[a-z0-9_]+/[a-z0-9_@]+")


class Metrics:
    """The values of one step on this rank. The method that adds a value determines its reduction
    over ranks.

    Values are numbers or one-element tensors; tensors stay on their device until `reduced`, so
    adding never waits for a GPU. A name may be added many times (micro-batches), always by the same
    method.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float | Tensor] = {}
        self._largest: dict[str, Tensor] = {}
        self._kinds: dict[str, str] = {}

    def add_mean(
        self, name: str, numerator: float | Tensor, denominator: float | Tensor = 1.0
    ) -> None:
        """Adds a mean: sum of numerators / sum of denominators over calls and ranks; omitted if the
        latter is 0."""
        self._add(name, "mean", ("/numerator", numerator), ("/denominator", denominator))

    def add_sum(self, name: str, value: float | Tensor) -> None:
        """Adds a sum over calls and ranks."""
        self._add(name, "sum", ("", value))

    def add_max(self, name: str, value: float | Tensor) -> None:
        """Adds a maximum over calls and ranks. NaN counts as infinite: all-reduces would drop
        it."""
        self._claim(name, "max")
        inf = torch.inf
        value = torch.as_tensor(_detached(value), dtype=torch.float64).nan_to_num(
            nan=inf, posinf=inf, neginf=-inf
        )
        old = self._largest.get(name, value)
        self._largest[name] = torch.maximum(value, old.to(value.device))

    def add_rate(self, name: str, amount: float | Tensor, seconds: float) -> None:
        """Adds a throughput, once per step: the amount of all ranks divided by the seconds of the
        slowest rank."""
        assert name not in self._kinds, f"metric {name}: a rate is added once a step"
        self._add(name, "rate", ("/amount", amount))
        self._largest[name] = torch.tensor(seconds, dtype=torch.float64)

    def _claim(self, name: str, kind: str) -> None:
        assert _NAME.fullmatch(name), f"metric name {name!r} is not group/name in lower case"
        old = self._kinds.setdefault(name, kind)
        assert old == kind, f"metric {name} was added as {old} and now as {kind}"

    def _add(self, name: str, kind: str, *parts: tuple[str, float | Tensor]) -> None:
        self._claim(name, kind)
        for suffix, value in parts:
            self._sums[name + suffix] = self._sums.get(name + suffix, 0.0) + _detached(value)

    def reduced(self, reduce: Reduce) -> dict[str, float]:
        """Collective. Returns the step's reduced values, sorted by name. All ranks must have added
        the same names.

        `reduce(tensor, op)`, op "sum" or "max", all-reduces a float64 vector (Mesh.reduce). Three
        small collectives.
        """
        self._check_same_names(reduce)
        sums = _reduce_values(self._sums, reduce, "sum")
        largest = _reduce_values(self._largest, reduce, "max")
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

    def _check_same_names(self, reduce: Reduce) -> None:
        """Compares the names by hash: vectors of unequal length would hang or corrupt the
        reduction."""
        text = json.dumps(sorted(self._kinds.items()))
        # 48 bits: exact in float64
        mine = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
        both = torch.tensor([mine, -mine], dtype=torch.float64, device="cpu")
        largest, negated_smallest = reduce(both, "max").tolist()
        assert largest == -negated_smallest, f"ranks measured different metrics; this rank: {text}"


def _detached(value: float | Tensor) -> float | Tensor:
    if isinstance(value, Tensor):
        return value.detach().double()
    return value


def _reduce_values(
    values: Mapping[str, float | Tensor], reduce: Reduce, op: str
) -> dict[str, float]:
    names = sorted(values)
    if not names:
        return {}
    vector = torch.stack(
        [torch.as_tensor(values[n], dtype=torch.float64, device="cpu").reshape(()) for n in names]
    )
    return dict(zip(names, reduce(vector, op).tolist(), strict=True))


class StepTimer:
    """Measures the wall seconds of one step and of its phases, which do not nest. Starts at
    construction."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        on_phase: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._clock = clock
        self._on_phase = on_phase
        self._start = clock()
        self._open: str | None = None
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block; repeated names add up."""
        assert self._open is None, (
            f"phase {name} inside phase {self._open}: its seconds would count twice"
        )
        self._open = name
        start = self._clock()
        self._on_phase(name)
        try:
            yield
        finally:
            if torch.cuda.is_initialized():
                # otherwise this phase's kernels count towards the next one
                torch.cuda.synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - start
            self._open = None
            self._on_phase(f"what follows {name}")

    def record(self, metrics: Metrics, num_tokens: float | Tensor, num_gpus: int) -> None:
        """Adds time/<phase>_s and time/step_s (of the slowest rank), time/framework_fraction,
        perf/tokens_per_s and perf/tokens_per_s_gpu.

        `num_tokens`: tokens of the step on this data-parallel rank, including prompts. `num_gpus`:
        of all trainers and engines.
        """
        step = self._clock() - self._start
        for name, seconds in self.seconds.items():
            metrics.add_max(f"time/{name}_s", seconds)
        metrics.add_max("time/step_s", step)
        overhead = step - sum(self.seconds.values())  # what the framework does between phases
        metrics.add_mean("time/framework_fraction", overhead, step)
        metrics.add_rate("perf/tokens_per_s", num_tokens, step)
        metrics.add_rate("perf/tokens_per_s_gpu", num_tokens / num_gpus, step)
