"""Runs many steps of the tiny model while random faults strike: it must finish, learn, not grow,
leave nothing.

    python bench/soak.py [--steps 200] [--every 10] [--engines] [--seed 0] [--folder FOLDER]
                         [--answers grader|environment|agent]

About every tenth step one fault of bench/faults.py, drawn by the seed, strikes at its moment.
Resident memory and open files of every process of the run are sampled every step; a process that
was started again begins anew. Writes bench/results/soak.{json,md}.

With --answers environment or agent rewards come from one of two turns, which a fault may hang.
Writes soak_environment or soak_agent.

With --engines only engines are killed, in turn inside a transfer of weights and at any moment, and
the samples, losses and rewards must be those of a run that nobody disturbed: weights that are not
the step's would sample something else. Writes bench/results/soak_engines.{json,md}.

With --max-staleness N the run samples ahead (weights.in_flight: retract) and grades take a random
time. Each group must be trained on once, in the order of an undisturbed run, by tokens within the
bound. Writes soak_ahead or, with --engines, soak_engines_ahead.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from common import provenance, write_results
from dispatched import dispatched, sampling_ahead
from faults import (
    FAULTS,
    LIMIT_S,
    ROOT,
    SAMPLES,
    SETTINGS,
    Job,
    Scene,
    assert_same_run,
    is_live,
    megagrpo,
    merged,
    metrics,
    prepare,
    rollouts,
    strike,
    write_experiment,
)

GROWTH = 1.1  # of a process's memory over the steps that it lived, after its first ten
WARM_STEPS, END = 10, 0.2  # the first and the last fifth of the run are compared
ENGINES_KILLED = ("engine killed in a weight update", "engine killed at a random moment")
_NAME_CHARACTERS = 15  # of a process, in Linux


ANSWERS = {  # what answers the model, in the place of a grader
    "environment": {
        "environment": {"function": "fault_graders:LowDigits", "max_turns": 3, "timeout_s": 20}
    },
    "agent": {
        "agent": {"function": "fault_graders:low_digits_agent", "workers": 1, "timeout_s": 60}
    },
}


def settings_of(num_steps: int, answers: str = "grader") -> dict:
    """Of the run and of the one that is left alone."""
    settings = SETTINGS | {
        "checkpoint": {"every": 1},
        "sampling": {"max_response_tokens": 8},
        "train": {"num_steps": num_steps},
    }
    if answers != "grader":
        del settings["reward"]
        ((name, section),) = ANSWERS[answers].items()
        settings["sampling"] = {"max_response_tokens": 16, name: section}
    return settings


@dataclass(frozen=True)
class Held:
    """What a process holds: MiB of memory, and open files."""

    memory: float
    files: int


def held(job: Job) -> dict[str, Held]:
    """By process, named by what it does and its id."""
    found = {}
    for process in job.tree():
        try:
            words = process.cmdline()
            trains = "train" in words and "torch.distributed.run" not in words
            kind = "trainer" if trains else process.name()[:_NAME_CHARACTERS]
            if is_live(process):
                memory = process.memory_info().rss / 2**20
                found[f"{kind} {process.pid}"] = Held(memory, process.num_fds())
        except psutil.Error:
            continue
    return found


def soak(
    folder: Path, num_steps: int, every: int, names: list[str], answers: str = "grader"
) -> dict:
    """Run it, with a fault of `names` after each `every` steps; returns what happened.

    Nothing is checked yet but that the run ended well and left no process.
    """
    seen: list[dict[str, Held]] = []
    rows, started = [], time.monotonic()
    with Job("run", write_experiment(folder, **settings_of(num_steps, answers))) as job:
        scene = Scene(job, folder)
        for number, name in enumerate(names):
            scene.wait(
                lambda step=every * (number + 1): watched(scene, seen) >= step,
                f"the step before: {name}",
            )
            rows.append(strike(scene, name))
            print(json.dumps(rows[-1]), flush=True)
        while job.process.poll() is None:
            watched(scene, seen)
            assert time.monotonic() - started < LIMIT_S * 8, "no end"
            time.sleep(0.5)
        watched(scene, seen)
        done = job.finish(LIMIT_S * 8)  # fails when a process is left
    assert done.status == 0, done.stderr
    rewards = [metrics(folder)[step]["reward/mean"] for step in range(1, num_steps + 1)]
    part = max(1, int(END * num_steps))
    counts = [
        sum(len(group["samples"]) for group in groups) for groups in rollouts(folder).values()
    ]
    return {
        "steps": num_steps,
        "faults": rows,
        "minutes": (time.monotonic() - started) / 60,
        "reward_first": sum(rewards[:part]) / part,
        "reward_last": sum(rewards[-part:]) / part,
        "samples_lost": SAMPLES * num_steps - sum(counts),
        "growth": growth(seen, lambda each: each.memory),
        "files": growth(seen, lambda each: each.files),
        "memory": [{name: asdict(each) for name, each in step.items()} for step in seen],
    }


def watched(scene: Scene, seen: list[dict[str, Held]]) -> int:
    """The step, after noting once a step what every process holds."""
    step = scene.step()
    while len(seen) < step:
        seen.append(held(scene.job))
    return step


def growth(seen: list[dict[str, Held]], of: Callable[[Held], float]) -> float:
    """Largest ratio of what a process held last to that of its tenth step; 1 when none lived so
    long."""
    ratios = [1.0]
    for name in {name for sample in seen for name in sample}:
        life = [of(sample[name]) for sample in seen if name in sample]
        if len(life) > WARM_STEPS + 1:
            ratios.append(life[-1] / max(life[WARM_STEPS], 1))
    return max(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between faults")
    parser.add_argument(
        "--engines",
        action="store_true",
        help="kill engines only, and compare with an undisturbed run",
    )
    parser.add_argument("--answers", choices=["grader", *ANSWERS], default="grader")
    parser.add_argument("--max-staleness", type=int, default=0, help="versions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=lambda path: Path(path).resolve(), default=ROOT / "runs" / "soak"
    )
    args = parser.parse_args()
    if args.max_staleness:
        SETTINGS.update(merged(SETTINGS, sampling_ahead(args.max_staleness, "retract")))
        SETTINGS["reward"]["grader"] = "fault_graders:late_low_digits"
    prepare(args.folder)
    random.seed(args.seed)
    steps = range(args.every, args.steps - 1, args.every)
    if args.engines:
        names = [ENGINES_KILLED[number % 2] for number in range(len(steps))]
    else:
        names = [random.choice(list(FAULTS)) for _ in steps]
    run = args.folder / "run"
    result = soak(run, args.steps, args.every, names, args.answers)
    lines = table(result)
    if args.engines or args.max_staleness:
        alone = args.folder / "undisturbed"
        done = megagrpo(
            "run",
            write_experiment(alone, **settings_of(args.steps, args.answers)),
            timeout_s=LIMIT_S * 4,
        )
        assert done.status == 0, done.stderr
        (prompts, lag), (expected, _) = dispatched(run), dispatched(alone)
        assert prompts == expected and lag <= args.max_staleness, lag
        if args.max_staleness:
            lines.append(
                (
                    "groups trained on, once each and in the order of an undisturbed run",
                    str(len(prompts)),
                )
            )
            lines.append(("largest lag of a token, versions", str(lag)))
        else:
            assert_same_run(run, alone, args.steps)
            lines.append(
                ("samples, losses and rewards of an undisturbed run", "yes, the same bits")
            )
    data = provenance() | {"seed": args.seed} | result
    name = "soak" + "_engines" * args.engines + "_ahead" * bool(args.max_staleness)
    name += "" if args.answers == "grader" else f"_{args.answers}"
    write_results(name, data, ("what", "figure"), lines)
    learned = result["reward_last"] > result["reward_first"]
    assert (
        result["samples_lost"] == 0 and max(result["growth"], result["files"]) <= GROWTH and learned
    ), "see the table"


def table(result: dict) -> list[tuple[str, str]]:
    slowest = max((row["recovered_s"] for row in result["faults"]), default=0.0)
    rise = result["reward_last"] - result["reward_first"]
    return [
        (
            "finished",
            f"{result['steps']} steps, {len(result['faults'])} faults, {result['minutes']:.1f} "
            "minutes",
        ),
        ("slowest recovery", f"{slowest:.1f} s"),
        ("samples lost", str(result["samples_lost"])),
        (
            "mean reward, first and last fifth",
            f"{result['reward_first']:.3f}, {result['reward_last']:.3f} ({rise:+.3f})",
        ),
        ("largest growth of a process's memory", f"{result['growth']:.3f} times"),
        ("largest growth of a process's open files", f"{result['files']:.3f} times"),
        ("processes left", "0"),
    ]


if __name__ == "__main__":
    main()
