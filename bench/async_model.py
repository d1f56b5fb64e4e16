"""Would engines on GPUs of trainers that wait for samples make a step faster? A model, fed by
`megagrpo plan`.

    python bench/async_model.py

Seconds of decode steps, prefill, training and publish are the planner's roofline; what is simulated
is which request runs where. Requests start in order in the engine that is least full; one that has
begun stays. With lending, trainers that wait move optimiser and gradients to the host, wake
engines, which take and prove the weights, and requests that have not begun go to them too. When the
step's batch is there they leave; what still runs in them goes to the other engines, which read
prompt and tokens again. Nothing here was measured on such GPUs. Writes bench/results/async_model.*
"""

import argparse
import heapq
import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from common import ROOT, provenance, write_results

from megagrpo.check.engine_memory import EngineSide, Lengths, engine_side
from megagrpo.check.hardware import CONTEXT_BYTES, HOST_GB_S
from megagrpo.check.problems import longest_samples
from megagrpo.config.load import load_config
from megagrpo.tools.plan.roofline import Plan, decode_seconds, plan_step, prefill_seconds
from megagrpo.tools.plan.search import Options, target_of

ALLOCATE_S, RELEASE_S = 5.0, 1.0  # of an engine: memory and calls; its process and graphs are kept
DIGEST_SHARE = 0.1  # of the memory's rate at which weights are proved
SLOW_WAKE_S = 60.0  # instead of ALLOCATE_S, to see how much hangs on it
STEPS, WARM = 22, 4
SMALLER = ("actor.world_size=16", "rollout.num_engines=2", "rollout.min_healthy_engines=1")
# experiment, model, what is different, and the split of the same nodes with the best bound, by
# --search
SHAPES = {
    "235B, 16 + 8": (
        "qwen3_235b_a22b", "Qwen3-235B-A22B", ("rollout.num_engines=4", "rollout.min_healthy_engines=1"),
        ("actor.world_size=64", "actor.parallel.cp=2", "rollout.num_engines=8"),
    ),
    "671B, 30 + 32": ("deepseek_v3_671b", "DeepSeek-V3-0324", (), None),
    "30B, 2 + 1": (
        "qwen3_30b_a3b", "Qwen3-30B-A3B", SMALLER,
        ("actor.world_size=8", "actor.parallel.tp=1", "actor.parallel.pp=2", "actor.parallel.vpp=6",
         "actor.parallel.cp=4", "actor.parallel.ep=4", "rollout.num_engines=4"),
    ),
    "235B, 16 + 8, 256 samples": ("qwen3_235b_math", "Qwen3-235B-A22B", (), None),
}  # fmt: skip
HEADER = (
    "nodes that train + sample", "N", "s a step", "lending", "saved", "GPUs idle", "lending",
    "saved if rollout is 65 %", "50 %", "saved, short tail", "other split, s", "all shared, s",
)  # fmt: skip


@dataclass(frozen=True)
class Speed:
    """An engine's seconds: of a decode step base + slope x tokens in its cache, by running samples;
    of a prefill."""

    slots: int
    base: list[float]
    slope: list[float]
    prefill: tuple[float, float]  # times tokens, times their square


@dataclass(frozen=True)
class Case:
    """What one simulated run has. Seconds are those of a step."""

    plan: Plan
    own: int  # engines with GPUs of their own
    lent: int  # engines on trainers' GPUs
    own_speed: Speed
    lent_speed: Speed
    train_s: float
    publish_s: float
    wake_s: float  # until a lent engine samples
    leave_s: float  # until its trainers train

    @property
    def worth(self) -> bool:
        """Whether a mean response takes longer than the switch."""
        train, lengths, speed = self.plan.config.train, self.plan.target.lengths, self.own_speed
        samples = train.num_prompts_per_step * train.group_size
        number = min(speed.slots, samples // max(self.own, 1))
        step_s = speed.base[number] + speed.slope[number] * number * lengths.running
        return lengths.mean * step_s > self.wake_s + self.leave_s


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows = [row for name in SHAPES for row in _rows(name)]
    lines = [_line(row) for row in rows if row["staleness"] < 2]
    assumed = {"host_gb_s": HOST_GB_S, "allocate_s": ALLOCATE_S, "release_s": RELEASE_S}
    assumed |= {
        "digest_share": DIGEST_SHARE,
        "slow_wake_s": SLOW_WAKE_S,
        "steps": STEPS,
        "left_out": WARM,
    }
    write_results("async_model", {**provenance(), "assumed": assumed, "rows": rows}, HEADER, lines)


def _rows(name: str) -> list[dict]:
    """All figures of a shape, by max_staleness."""
    _, _, changes, split = SHAPES[name]
    case, short = _case(name, changes), _case(name, changes, long_tail=False)
    rollout = _run(case, 0, lend=False)[0] - case.train_s - case.publish_s
    variants = {"as planned": case, "short tail": short}
    variants["slow wake"] = replace(case, wake_s=case.wake_s + SLOW_WAKE_S - ALLOCATE_S)
    for share in (0.65, 0.5):  # of a synchronous step
        train_s = rollout * (1 - share) / share - case.publish_s
        variants[f"rollout {share:.0%}"] = replace(case, train_s=train_s)
    other = None if split is None else _case(name, (*changes, *split))
    every = case.lent + case.own
    shared = replace(case, own=0, lent=every, train_s=case.train_s * case.lent / every, publish_s=0)
    planned = {
        key: getattr(case, key)
        for key in ("own", "lent", "train_s", "publish_s", "wake_s", "leave_s")
    }
    planned |= {"slots": [case.own_speed.slots, case.lent_speed.slots], "rollout_s": rollout}
    return [
        {"shape": name, "staleness": staleness, "planned": planned}
        | {variant: _compared(each, staleness) for variant, each in variants.items()}
        | {"other split": other and _run(other, staleness, lend=False)[0]}
        | {"all shared": None if staleness else _run(shared, 0, lend=True)[0]}
        for staleness in range(3)
    ]


def _compared(case: Case, staleness: int) -> dict:
    before, after = (_run(case, staleness, lend) for lend in (False, True))
    return {
        "seconds": [before[0], after[0]],
        "saved": 1 - after[0] / before[0],
        "idle": [before[1], after[1]],
    }


def _line(row: dict) -> list[str]:
    planned = row["as planned"]
    saved = [f"{row[key]['saved']:.0%}" for key in ("rollout 65%", "rollout 50%", "short tail")]
    others = [
        "" if row[key] is None else f"{row[key]:.0f}" for key in ("other split", "all shared")
    ]
    return [
        row["shape"], str(row["staleness"]), *(f"{each:.0f}" for each in planned["seconds"]),
        f"{planned['saved']:.0%}", *(f"{each:.0%}" for each in planned["idle"]), *saved, *others,
    ]  # fmt: skip


def _case(name: str, changes: tuple[str, ...], long_tail: bool = True) -> Case:
    """The planner's figures for a shape. Without long_tail lengths are those that it assumes."""
    file, model, *_ = SHAPES[name]
    config = load_config(
        ROOT / f"configs/{file}.yaml", [f"model.path={ROOT / 'configs/models' / model}", *changes]
    )
    target = target_of(config, Options())
    if long_tail:
        target = replace(
            target, lengths=_long_tail(target.lengths, config.sampling.max_response_tokens)
        )
    plan = plan_step(config, target)
    hardware, server, held = (
        target.hardware,
        plan.engine.server,
        plan.trainers.phases["rollout"].parts,
    )
    kept = held["parameters"] + held["NCCL"] + CONTEXT_BYTES
    room = replace(hardware, memory_mib=int(hardware.memory_mib - kept / 2**20))
    lent = engine_side(
        target.work, server, target.lengths, max(longest_samples(config).values()), room
    )
    moved = (held["gradients"] + held["optimiser"]) / (HOST_GB_S * 1e9)
    return Case(
        plan=plan,
        own=config.rollout.num_engines,
        lent=0 if lent.problems else config.actor.world_size // server.tp,
        own_speed=_speed(plan, plan.engine),
        lent_speed=_speed(plan, lent),
        train_s=plan.seconds["logprobs"] + plan.seconds["update"],
        publish_s=plan.seconds["publish"],
        wake_s=moved + ALLOCATE_S + _taking_seconds(plan),
        leave_s=moved + RELEASE_S,
    )


def _long_tail(lengths: Lengths, longest: int) -> Lengths:
    """Log-normal as the planner's, with a sigma of 1: half of the responses have a tenth of the
    longest at most."""
    normal = [NormalDist().inv_cdf((point + 0.5) / 4096) for point in range(4096)]
    median = longest / math.exp(NormalDist().inv_cdf(0.99))
    return replace(lengths, responses=np.clip(median * np.exp(normal), 1.0, longest))


def _taking_seconds(plan: Plan) -> float:
    """Seconds in which an engine on trainers' GPUs takes weights, a part from its own nodes, and
    proves them."""
    actor, target, weights = plan.config.actor, plan.target, plan.engine.weights
    ranks, rates = max(plan.engine.server.tp, target.gpus_per_node), target.hardware.rates
    near = (
        max(1, ranks * actor.parallel.pp // actor.world_size) / actor.parallel.pp
    )  # whole pipeline stages
    seconds = weights * near / (rates.inside_gb_s * 1e9) + weights * (1 - near) / (
        rates.between_gb_s * 1e9
    )
    return seconds / rates.efficiency + weights / (
        target.hardware.memory_tb_s * 1e12 * DIGEST_SHARE
    )


def _speed(plan: Plan, engine: EngineSide) -> Speed:
    target, server, slots = plan.target, engine.server, max(1, engine.concurrent)
    running, held = np.arange(slots + 1.0), target.lengths.running
    base, full = (
        sum(decode_seconds(target, server, running, np.array(tokens)).values())
        for tokens in (0.0, held)
    )
    slope = (full - base) / np.maximum(running * held, 1)
    one, two = (
        prefill_seconds(target, server, tokens, tokens * tokens / 2) for tokens in (1e4, 2e4)
    )
    square = (two - 2 * one) / 2e8
    return Speed(slots, base.tolist(), slope.tolist(), (one / 1e4 - square * 1e4, square))


class Engine:
    """Decodes its running samples together, one token each a step."""

    def __init__(self, speed: Speed, now: float, lent: bool):
        self.speed, self.now, self.lent = speed, now, lent
        self.steps = self.context = self.busy_s = 0.0
        self.running: list[tuple[float, int]] = []  # a heap: at which step it ends, sample

    def advance(self, now: float) -> None:
        """Decodes until then."""
        if self.running and now > self.now:
            number = len(self.running)
            first, slope = self._step_s(), self.speed.slope[number] * number
            seconds = now - self.now
            steps = 2 * seconds / (first + math.sqrt(first * first + 2 * slope * seconds))
            self.steps, self.context = self.steps + steps, self.context + number * steps
            self.busy_s += seconds
        self.now = max(self.now, now)

    def next_end(self) -> float:
        """When the first of its samples is finished."""
        if not self.running:
            return math.inf
        number, steps = len(self.running), max(0.0, self.running[0][0] - self.steps)
        return self.now + steps * (self._step_s() + self.speed.slope[number] * number * steps / 2)

    def begin(self, sample: int, held: float, left: float) -> None:
        """Reads the tokens that a sample has, and decodes what is left."""
        self.stop(self._prefill_s(held))
        self.context += held
        heapq.heappush(self.running, (self.steps + left, sample))

    def stop(self, seconds: float) -> None:
        """Decodes nothing for a while."""
        self.now, self.busy_s = self.now + seconds, self.busy_s + seconds

    def read_again(self) -> None:
        """Reads what all of its samples have again, each as long as their mean."""
        number = len(self.running)
        self.stop(number * self._prefill_s(self.context / number) if number else 0.0)

    def _step_s(self) -> float:
        number = len(self.running)
        return self.speed.base[number] + self.speed.slope[number] * self.context

    def _prefill_s(self, tokens: float) -> float:
        once, square = self.speed.prefill
        return tokens * (once + square * tokens)


class Loop:
    """The trainers' loop, and the requests of the batches that it has begun."""

    def __init__(self, case: Case, staleness: int, lend: bool):
        self.case, self.staleness, self.lend = case, staleness, lend and case.lent > 0
        train, chance = case.plan.config.train, np.random.default_rng(0)
        shape = (STEPS + staleness, train.num_prompts_per_step, train.group_size)
        normal = (chance.normal(size=shape[:2])[..., None] + chance.normal(size=shape)) / math.sqrt(
            2
        )  # prompt, own
        lengths = case.plan.target.lengths
        quantile = np.interp(
            normal, [NormalDist().inv_cdf((k + 0.5) / 4096) for k in range(4096)], lengths.responses
        )
        self.left: list[float] = quantile.reshape(-1).tolist()
        self.held = [lengths.prompt] * len(self.left)
        self.length = list(self.left)
        self.batch = train.num_prompts_per_step * train.group_size
        self.missing = [self.batch] * shape[0]
        self.waiting: list[int] = []  # a heap of samples
        self.own = [Engine(case.own_speed, 0.0, False) for _ in range(case.own)]
        self.lent: list[Engine] = []
        self.begun, self.now, self.returned = 0, 0.0, 0.0
        self.lent_busy_s = self.trained_s = 0.0

    def step(self, number: int) -> None:
        """Waits for a batch, trains on it and publishes."""
        last = (number + 1 + self.staleness) * self.batch
        self.waiting += range(self.begun, last)  # ascending and behind what waits: a heap as it was
        self.begun, self.returned = last, self.now
        if (
            self.lend
            and self.waiting
            and self.missing[number]
            and (self.case.worth or not self.own)
        ):
            ready = self.now + self.case.wake_s
            self.lent = [Engine(self.case.lent_speed, ready, True) for _ in range(self.case.lent)]
        self._sample(number, math.inf)
        self._take_back(list(self.lent))
        trained = max(self.now, self.returned) + self.case.train_s
        self._sample(None, trained)
        for engine in self.own:
            engine.advance(trained)
            engine.stop(self.case.publish_s)
            engine.read_again()
        self.now = trained + self.case.publish_s
        self.trained_s += self.case.train_s + self.case.publish_s

    def busy_gpu_s(self) -> float:
        """GPU seconds in which anything was sampled, trained or published; switches are none."""
        engines = sum(engine.busy_s for engine in (*self.own, *self.lent)) + self.lent_busy_s
        trained = self.trained_s * self.case.plan.config.actor.world_size
        return engines * self.case.plan.engine.server.tp + trained

    def _sample(self, batch: int | None, until: float) -> None:
        """Samples until the batch is there, or until a time."""
        self._fill()
        while batch is None or self.missing[batch]:
            engine = min((*self.own, *self.lent), key=Engine.next_end, default=None)
            end = math.inf if engine is None else engine.next_end()
            if end > until or end == math.inf:
                break
            engine.advance(end)
            self.now = max(self.now, end)
            _, sample = heapq.heappop(engine.running)
            engine.context -= self.held[sample] + self.left[sample]
            self.missing[sample // self.batch] -= 1
            self._fill()
            if engine.lent and not engine.running and not self.waiting:
                self._take_back([engine])
        self.now = max(self.now, until) if until < math.inf else self.now

    def _fill(self) -> None:
        """Starts what waits, in order, in the engine that is least full."""
        while self.waiting:
            engine = min(
                (*self.own, *self.lent),
                key=lambda each: len(each.running) / each.speed.slots,
                default=None,
            )
            if engine is None or len(engine.running) >= engine.speed.slots:
                return
            sample = heapq.heappop(self.waiting)
            engine.advance(self.now)
            engine.begin(sample, self.held[sample], self.left[sample])

    def _take_back(self, engines: list[Engine]) -> None:
        """Ends lent engines; their samples wait for others, with the tokens that they have."""
        for engine in engines:
            engine.advance(self.now)
            for end, sample in engine.running:
                left = max(0.0, end - engine.steps)
                self.held[sample] += self.left[sample] - left
                self.left[sample] = left
                heapq.heappush(self.waiting, sample)
            self.lent.remove(engine)
            self.lent_busy_s += engine.busy_s
            self.returned = max(self.returned, self.now + self.case.leave_s)


def _run(case: Case, staleness: int, lend: bool) -> tuple[float, float]:
    """Seconds of a step, and the share of GPU time in which neither samples nor training ran."""
    loop = Loop(case, staleness, lend)
    for number in range(WARM):
        loop.step(number)
    start, busy = loop.now, loop.busy_gpu_s()
    for number in range(WARM, STEPS):
        loop.step(number)
    seconds, server = loop.now - start, case.plan.engine.server
    ranks = case.plan.config.actor.world_size + case.plan.config.rollout.num_engines * server.tp
    return seconds / (STEPS - WARM), 1 - (loop.busy_gpu_s() - busy) / (seconds * ranks)


if __name__ == "__main__":
    main()
