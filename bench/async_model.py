"""What sampling ahead is worth on 16 + 8 nodes: a model of the loop, fed with published shares of a step's stages.

    python bench/async_model.py

16 nodes sample, in `--slots` slots of one sample each, and 8 train. A synchronous step is 1: in `--rollout` of it the
engines sample, where the last hundredth of the samples takes `--tail` (published for runs of this kind: 62 to 70 %, and
up to 28 %); the rest trains and publishes. Response lengths are log-normal, cut at the longest, with a tail such that
the synchronous rollout has that share. Slots take samples in order of dispatch, each for the time of its length: how
fast an engine samples does not depend on how many samples it runs, so that a tail gains nothing from being alone.
Nothing here was measured on such a cluster. Writes bench/results/async_model.*
"""

import argparse
import heapq

import numpy as np
from common import provenance, write_results

_STEPS, _WARM = 60, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=512, help="of a step")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--slots", type=int, default=4096, help="samples that run at once")
    parser.add_argument("--rollout", type=float, nargs="+", default=[0.62, 0.70], help="share of a synchronous step")
    parser.add_argument("--tail", type=float, nargs="+", default=[0.10, 0.28], help="share of a rollout")
    parser.add_argument("--extra", type=float, default=0.25, help="extra groups, as a share of a step's")
    parser.add_argument("--publish", type=float, default=0.02, help="share of a synchronous step")
    args = parser.parse_args()
    rows = []
    for rollout in args.rollout:
        for tail in args.tail:
            lengths = Lengths(tail, args)
            alone = _rollout_s(lengths, args)
            train = alone * (1 - rollout - args.publish) / rollout
            publish = alone * args.publish / rollout
            base = 0.0
            for name, staleness, extra, drain in (
                ("N = 0", 0, 0, False),
                ("N = 0, extra groups", 0, int(args.extra * args.groups), False),
                ("N = 1, drain", 1, 0, True),
                ("N = 1, retract", 1, 0, False),
                ("N = 2, drain", 2, 0, True),
                ("N = 2, retract", 2, 0, False),
            ):
                step, trainers, engines = _loop(lengths, args, train, publish, staleness, extra, drain)
                base = base or step
                rows.append([rollout, tail, name, step / base, base / step, trainers, engines])
    header = ("rollout's share", "tail's share", "variant", "step", "speed-up", "trainers idle", "engines idle")
    lines = [
        [f"{r:.0%}", f"{t:.0%}", name, f"{step:.2f}", f"{up:.2f}", f"{trainers:.0%}", f"{engines:.0%}"]
        for r, t, name, step, up, trainers, engines in rows
    ]
    write_results("async_model", {**provenance(), "arguments": vars(args), "rows": rows}, header, lines)


class Lengths:
    """Draws a group's response lengths, in seconds of one slot: log-normal, the longest such that the tail is right."""

    def __init__(self, tail: float, args: argparse.Namespace):
        self._args = args
        self._groups: dict[int, np.ndarray] = {}
        low, high = 0.1, 2.0
        for _ in range(20):
            self._sigma, self._groups = (low + high) / 2, {}
            found = np.mean([_tail_share(self, args, seed) for seed in range(3)])
            low, high = (self._sigma, high) if found < tail else (low, self._sigma)

    def group(self, number: int) -> np.ndarray:
        """[group_size] lengths of group `number`; half of the spread is the prompt's."""
        if number in self._groups:
            return self._groups[number]
        chance = np.random.default_rng(number)
        of_prompt, own = chance.normal(), chance.normal(size=self._args.group_size)
        self._groups[number] = np.minimum(
            np.exp(self._sigma * (of_prompt + own) / np.sqrt(2)), np.exp(3.5 * self._sigma)
        )
        return self._groups[number]


def _finish(lengths: Lengths, first: int, number: int, slots: list[float], start: float) -> np.ndarray:
    """When each of `number` groups from `first` on is finished, [number]; `slots` is a heap of when each is free."""
    done = np.zeros(number)
    for index in range(number):
        for length in lengths.group(first + index):
            until = max(heapq.heappop(slots), start) + length
            heapq.heappush(slots, until)
            done[index] = max(done[index], until)
    return done


def _tail_share(lengths: Lengths, args: argparse.Namespace, seed: int) -> float:
    samples = np.concatenate([lengths.group(10_000 * (seed + 1) + g) for g in range(args.groups)])
    slots = [0.0] * args.slots
    ends = []
    for length in samples:
        ends.append(heapq.heappop(slots) + length)
        heapq.heappush(slots, ends[-1])
    ends = np.sort(ends)
    return float(1 - ends[int(0.99 * len(ends))] / ends[-1])


def _rollout_s(lengths: Lengths, args: argparse.Namespace) -> float:
    return float(
        np.mean([_finish(lengths, s * args.groups, args.groups, [0.0] * args.slots, 0.0).max() for s in range(5)])
    )


def _loop(
    lengths: Lengths, args: argparse.Namespace, train: float, publish: float, staleness: int, extra: int, drain: bool
) -> tuple[float, float, float]:
    """Seconds of a step, and the shares of it in which trainers wait for samples and slots are empty."""
    slots, wanted = [0.0] * args.slots, args.groups
    now, begun = 0.0, 0
    open_groups: list[tuple[float, int, int]] = []  # end, number, deferrals
    marks, waited, work = [], 0.0, 0.0
    for step in range(_STEPS):
        target = wanted * (step + 1 + staleness) if not extra else wanted * (step + 1) + extra
        ends = _finish(lengths, begun, target - begun, slots, now)
        work += sum(float(lengths.group(begun + i).sum()) for i in range(target - begun)) if step >= _WARM else 0.0
        open_groups += [(float(end), begun + i, 0) for i, end in enumerate(ends)]
        begun = target
        if extra:
            taken = sorted(open_groups, key=lambda g: (g[2] < 1, g[0]))[:wanted]
        else:
            taken = sorted(open_groups, key=lambda g: g[1])[:wanted]
        left = {g[1] for g in taken}
        open_groups = [(end, number, times + 1) for end, number, times in open_groups if number not in left]
        ready = max(end for end, _, _ in taken)
        waited += max(0.0, ready - now) if step >= _WARM else 0.0
        now = max(now, ready) + train
        if drain and open_groups:
            latest = max(end for end, _, _ in open_groups)
            waited += max(0.0, latest - now) if step >= _WARM else 0.0
            now = max(now, latest)
        # all engines pause for a publish, what they run ends so much later
        slots = [end + publish if end > now else now + publish for end in slots]
        heapq.heapify(slots)
        open_groups = [(end + publish if end > now else end, number, times) for end, number, times in open_groups]
        now += publish
        marks.append(now)
    seconds = marks[-1] - marks[_WARM - 1]
    return seconds / (_STEPS - _WARM), waited / seconds, 1 - work / (seconds * args.slots)


if __name__ == "__main__":
    main()
