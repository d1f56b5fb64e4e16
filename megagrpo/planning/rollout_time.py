"""How long engines sample: a roofline of each forward pass, and the continuous batching of one engine, pass by pass."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megagrpo.planning.engine_memory import EngineSide, weight_elements
from megagrpo.planning.hardware import Hardware, efficiency
from megagrpo.planning.lengths import Lengths
from megagrpo.planning.work import ITEM, ModelWork

_STRIDE = 32  # decode steps that are taken at once, at most: a cache grows little in them
# SGLang 0.5.21 (managers/schedule_policy.py) lets a sample in when the cache has room for these tokens of it, and for
# this share of them for every running sample; the share is where its decay ends.
_NEW_TOKENS, _RESERVED = 4096, 0.1
_TAIL_SHARE = 0.1  # of the engine's samples: while no more than these are left, it is the long tail


@dataclass(frozen=True)
class RolloutTime:
    """Seconds until the last engine has its last sample, and where they go."""

    seconds: float
    parts: Mapping[str, float]  # "weights", "cache", "compute", "communication", "overhead", "prefill"
    tail_seconds: float  # while at most a tenth of the samples is left
    half_done: float  # seconds until half of the samples are there
    waited_for: float  # seconds that the mean engine waits for the last one
    at_once: float  # samples in a decode step, on average
    most_at_once: int
    retracted: int  # samples of one engine that were put back because the cache was full
    tokens_per_s: float  # sampled, of one engine, on average

    @property
    def limit(self) -> str:
        """Names what takes the most of the time."""
        return max(self.parts, key=lambda name: self.parts[name])


class EngineSpeed:
    """The roofline of one engine: bytes and FLOPs of a rank, and its all-reduces."""

    def __init__(self, work: ModelWork, side: EngineSide, hardware: Hardware, gpus_per_node: int):
        server = side.server
        self._work, self._server, self._hardware = work, server, hardware
        self._replicas = server.tp // server.attention_tp
        self._cell = work.cache_bytes(server.attention_tp, server.cache_width)
        experts = sum(layer.expert for layer in work.layers) / server.tp * ITEM
        self._expert_bytes = experts
        elements = weight_elements(work, server.tp, server.attention_tp)
        self._dense_bytes = elements * ITEM - experts - work.embedding / server.tp * ITEM  # few rows of it are read
        self._between = server.tp > gpus_per_node
        flops = sum(sum(work.forward_flops(layer)) for layer in work.layers) + 2.0 * work.head
        self._token_flops = flops / server.tp

    def decode(self, batch: float, context: float) -> dict[str, float]:
        """Returns the seconds of one decode step of `batch` samples that hold `context` tokens together, by part.

        Weights and cache are read from memory once a step; where the products take longer, the rest is compute.
        """
        h, work = self._hardware, self._work
        memory = h.memory_tb_s * 1e12 * efficiency("memory")
        touched = 1.0 - (1.0 - work.share) ** batch if work.experts else 0.0
        weights = (self._dense_bytes + self._expert_bytes * touched) / memory
        cache = context / self._replicas * self._cell / memory
        attention = context / self._replicas * work.decode_attention_flops * len(work.layers)
        flops = batch * self._token_flops + attention / self._server.attention_tp
        compute = flops / (h.bf16_tflops * 1e12 * efficiency("decode matmul"))
        return {
            "weights": weights,
            "cache": cache,
            "compute": max(0.0, compute - weights - cache),
            "communication": self._all_reduces(batch, 1),
            "overhead": efficiency("decode step ms") / 1e3 + len(work.layers) * efficiency("decode layer us") / 1e6,
        }

    def prefill(self, tokens: float, length: float) -> float:
        """Returns the seconds in which `tokens` tokens of samples of `length` go through all layers."""
        work, h = self._work, self._hardware
        attention = tokens * length / 2 * work.attention_flops * len(work.layers) / self._server.tp
        flops = tokens * self._token_flops + attention
        passes = -(-tokens // self._server.prefill_tokens)
        memory = passes * (self._dense_bytes + self._expert_bytes) / (h.memory_tb_s * 1e12 * efficiency("memory"))
        compute = flops / (h.bf16_tflops * 1e12 * efficiency("matmul"))
        return max(compute, memory) + self._all_reduces(tokens, passes) + passes * efficiency("decode step ms") / 1e3

    def _all_reduces(self, rows: float, passes: float) -> float:
        """Returns the seconds of two all-reduces a layer of `rows` hidden states in all, over the engine's ranks."""
        tp, h = self._server.tp, self._hardware
        if tp == 1:
            return 0.0
        link, latency = h.rates.inside_gb_s * efficiency("nvlink"), efficiency("all-reduce latency us")
        if self._between:
            link, latency = h.rates.between_gb_s * efficiency("network"), efficiency("all-reduce latency between us")
        moved = 2 * (tp - 1) / tp * rows * self._work.hidden * ITEM
        return 2 * len(self._work.layers) * (moved / (link * 1e9) + passes * latency / 1e6)


def rollout_time(speed: EngineSpeed, side: EngineSide, lengths: Lengths, samples: int, engines: int) -> RolloutTime:
    """Runs one engine on its share of the samples: that with the longest of them, which finishes last.

    Samples are dealt out like cards, the longest first, and arrive in an order that knows nothing of their lengths.
    """
    spread = lengths.spread(samples)[::-1]
    run = _Run(speed, side, lengths.prompt, _shuffled(spread[::engines]))
    seconds = run.seconds
    last = _shuffled(spread[engines - 1 :: engines])
    other = _Run(speed, side, lengths.prompt, last).seconds if engines > 1 and len(last) else seconds
    steps = max(run.steps, 1)
    return RolloutTime(
        seconds=float(max(seconds, other)),
        parts=run.parts,
        tail_seconds=seconds - run.time_left(_TAIL_SHARE),
        half_done=run.time_left(0.5),
        waited_for=float(abs(seconds - other) / 2),
        at_once=run.sampled / steps,
        most_at_once=run.most,
        retracted=run.retracted,
        tokens_per_s=run.sampled / seconds if seconds else 0.0,
    )


def _shuffled(lengths: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).permutation(lengths)


class _Run:
    """Continuous batching of one engine: samples wait until a slot and room in the cache are free.

    A full cache puts the sample that came last back to the front of the queue; its tokens are computed anew.
    """

    def __init__(self, speed: EngineSpeed, side: EngineSide, prompt: float, lengths: np.ndarray):
        self.seconds = 0.0
        self.parts = dict.fromkeys(("weights", "cache", "compute", "communication", "overhead", "prefill"), 0.0)
        self.steps = self.sampled = 0.0
        self.most = self.retracted = 0
        self._finished: list[float] = []
        self._speed, self._side, self._prompt, self._longest = speed, side, prompt, float(lengths.max(initial=0))
        waiting = deque((float(length), 0.0) for length in lengths)  # tokens still to sample, tokens sampled
        left, held = np.zeros(0), np.zeros(0)  # of the running samples, in the order in which they came
        while waiting or len(left):
            left, held = self._admit(waiting, left, held)
            while len(left) > 1 and float(held.sum()) + len(left) > side.cache_tokens:
                waiting.appendleft((float(left[-1]), float(held[-1] - prompt)))
                left, held = left[:-1], held[:-1]
                self.retracted += 1
            left, held = self._decode(left, held)

    def time_left(self, share: float) -> float:
        """Returns the seconds after which `share` of the samples is not yet there."""
        return self._finished[max(0, int(len(self._finished) * (1 - share)) - 1)] if self._finished else 0.0

    def _admit(
        self, waiting: deque[tuple[float, float]], left: np.ndarray, held: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Moves samples from the queue into the batch while there is room, and prefills them."""
        used, room = float(held.sum()), self._side.cache_tokens
        came: list[tuple[float, float]] = []
        while waiting and len(left) + len(came) < self._side.server.running_requests:
            need = self._prompt + waiting[0][1]
            reserved = min(self._longest, _NEW_TOKENS) * (1 + _RESERVED * (len(left) + len(came)))
            if (len(left) or came) and used + need + reserved > room:
                break
            came.append(waiting.popleft())
            used += need
        if not came:
            return left, held
        tokens = sum(self._prompt + sampled for _, sampled in came)
        seconds = self._speed.prefill(tokens, tokens / len(came))
        self.seconds += seconds
        self.parts["prefill"] += seconds
        left = np.concatenate([left, [length for length, _ in came]])
        held = np.concatenate([held, [self._prompt + sampled for _, sampled in came]])
        self.most = max(self.most, len(left))
        return left, held

    def _decode(self, left: np.ndarray, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples some tokens of every running sample, at most until the next one is finished."""
        batch = len(left)
        room = (self._side.cache_tokens - float(held.sum())) / batch
        steps = max(1.0, min(float(left.min()), _STRIDE, room))
        for name, seconds in self._speed.decode(batch, float(held.sum()) + batch * steps / 2).items():
            self.parts[name] += seconds * steps
            self.seconds += seconds * steps
        self.steps += steps
        self.sampled += steps * batch
        left, held = left - steps, held + steps
        running = left > 1e-9
        self._finished += [self.seconds] * int(batch - running.sum())
        return left[running], held[running]
