"""Measures a rank's seconds in Megatron's schedule: computing, pipeline idle time, waiting for the
slowest rank.

Megatron calls `config.timers(name)` around each forward and backward of a micro-batch. On a GPU the
marks are CUDA events, read once a step after everything has run, so measuring waits for nothing.
"""

import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megagrpo.config.hardware import hardware_called

_COMPUTE = ("forward-compute", "backward-compute")


class ScheduleClock:
    """Times Megatron's schedule as its `config.timers`; `gradients_done` ends one, before gradients
    are reduced."""

    def __init__(self, device: torch.device):
        self._device = device
        self.seconds = 0.0  # between `clear` and the last `take`
        self._one = torch.ones(1, device=device)
        self.clear()

    def clear(self) -> None:
        """Forgets what was measured, forwards of log-probabilities for instance."""
        self._began = time.perf_counter()
        self._spans: dict[str, list[tuple]] = {"compute": [], "schedule": [], "wait": []}
        self._open: dict[str, float | torch.cuda.Event] = {}

    def __call__(self, name: str, log_level: int = 0) -> SimpleNamespace:
        """Returns the timer of this name, as Megatron asks for it: of a micro-batch's forward or
        backward, or of the whole schedule; others are ignored.
        """

        # Megatron may ask for a barrier, which would be felt
        def start(
            barrier: bool = False,
        ) -> None:
            if name in (*_COMPUTE, "forward-backward"):
                self.start(name)

        def stop(barrier: bool = False) -> None:
            if name in _COMPUTE:
                self.stop(name, "compute")

        return SimpleNamespace(start=start, stop=stop)

    def start(self, name: str) -> None:
        """Marks the beginning of a span."""
        self._open[name] = self._now()

    def stop(self, name: str, kind: str) -> None:
        """Ends a span and counts it as compute, schedule or wait."""
        self._spans[kind].append((self._open.pop(name), self._now()))

    def gradients_done(self) -> None:
        """Collective. Lets pipeline stages meet, then everyone, as they would next anyway: two tiny
        all-reduces."""
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            dist.all_reduce(self._one.clone(), group=mpu.get_pipeline_model_parallel_group())
        self.stop("forward-backward", "schedule")
        self.start("wait")
        if dist.get_world_size() > 1:
            dist.all_reduce(self._one.clone())
        self.stop("wait", "wait")

    def take(self) -> dict[str, float]:
        """Collective. Returns metrics since `clear`, the same on every rank.

        schedule/compute_s and schedule/wait_s: mean over ranks, schedule/wait_max_s: of the rank
        that waits longest. schedule/pipeline_bubble: share of the schedule in which stages do not
        compute, with pipeline stages only.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._began
        mine = torch.tensor(
            [sum(map(_seconds, self._spans[kind])) for kind in ("compute", "schedule", "wait")],
            dtype=torch.float64,
        )
        self.clear()
        parts = [torch.empty_like(mine, device=self._device) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.to(self._device))
        everyone = torch.stack(parts)
        compute, schedule, wait = everyone.mean(0).tolist()
        metrics = {
            "schedule/compute_s": compute,
            "schedule/wait_s": wait,
            "schedule/wait_max_s": float(everyone[:, 2].max()),
        }
        if mpu.get_pipeline_model_parallel_world_size() > 1 and schedule > 0:
            metrics["schedule/pipeline_bubble"] = max(1 - compute / schedule, 0.0)
        return metrics

    def _now(self) -> "float | torch.cuda.Event":
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def mfu(
    flops: float, seconds: float, ranks: int, width: int, device: torch.device
) -> dict[str, float]:
    """Returns perf/mfu: the share of all ranks' peak that `flops` of an update are, on GPUs whose
    peak is known."""
    gpu = None
    if device.type == "cuda":
        gpu = hardware_called(torch.cuda.get_device_name(device))
    return {} if gpu is None else {"perf/mfu": flops / seconds / gpu.peak(width) / ranks}


def _seconds(span: tuple) -> float:
    start, end = span
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
