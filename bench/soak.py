"""Runs many steps of the tiny model while random faults strike: it must finish, learn, not grow,
leave nothing.

    python bench/soak.py [--steps 200] [--every 10] [--engines] [--seed 0] [--folder FOLDER]
                         [--answers grader|environment|agent]

About every tenth step one fault of bench/faults.py strikes at its moment: of an engine, a trainer,
the launcher, the disk, the network, or what grades; the seed draws in which order, and how each.
Each prompt must be trained on once an epoch. Resident memory and open files of every process of the
run are sampled every step; a process that was started again begins anew. Writes
bench/results/soak.{json,md,png}.

With --answers environment or agent rewards come from one of two turns, which a fault may hang.
Writes soak_environment or soak_agent.

With --engines only engines are killed, in turn inside a transfer of weights and at any moment, and
the samples, losses and rewards must be those of a run that nobody disturbed: weights that are not
the step's would sample something else. Writes bench/results/soak_engines.{json,md,png}.

With --max-staleness N the run samples ahead (weights.in_flight: retract) and grades take a random
time. Each group must be trained on once, in the order of an undisturbed run, by tokens within the
bound. Writes soak_ahead or, with --engines, soak_engines_ahead.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from common import RESULTS, provenance, write_results
from dispatched import dispatched, not_once, sampling_ahead
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
    small_disk,
    strike,
    write_experiment,
)
from run_megagrpo import is_parent_of_ranks

STEP_S = 60.0  # the most that a step may take, faults included, on a busy machine
GROWTH = 1.1  # of what a process holds over the steps that it lived, after its first ten
WARM_STEPS, AT_REST = 10, 10
# openai's client of each rollout: memory grows for 35 steps and then no more, also in a bare loop
WARM_STEPS_OF_AGENTS = 40
END = 0.2  # the first and the last fifth of the run are compared
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
            kind = process.name()[:_NAME_CHARACTERS]
            if process.pid == job.process.pid:
                kind = "launcher"
            elif "torch.distributed.run" in words or is_parent_of_ranks(process):
                kind = "torchrun"
            elif "train" in words:
                kind = "trainer"
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
    config = write_experiment(folder, **settings_of(num_steps, answers))
    with (
        small_disk(folder / "checkpoints"),
        Scene(Job("run", config), folder) as scene,
    ):
        for number, name in enumerate(names):
            scene.wait(
                lambda step=every * (number + 1): watched(scene, seen) >= step,
                f"the step before: {name}",
                poll_s=0.25,
            )
            rows.append(strike(scene, name))
            print(json.dumps(rows[-1]), flush=True)
            kept = {"faults": rows, "memory": held_by_step(seen)}  # if it breaks
            (folder.parent / "so_far.json").write_text(json.dumps(kept))
        while scene.job.process.poll() is None:
            watched(scene, seen)
            assert time.monotonic() - started < LIMIT_S + STEP_S * num_steps, "no end"
            time.sleep(0.25)
        watched(scene, seen)
        done = scene.job.finish(LIMIT_S)  # fails when a process is left
    assert done.status == 0, done.stderr
    rewards = [metrics(folder)[step]["reward/mean"] for step in range(1, num_steps + 1)]
    part = max(1, int(END * num_steps))
    counts = [
        sum(len(group["samples"]) for group in groups) for groups in rollouts(folder).values()
    ]
    rows_of_data = len((folder.parent / "data" / "train.jsonl").read_text().splitlines())
    return {
        "steps": num_steps,
        "answers": answers,
        "faults": rows,
        "minutes": (time.monotonic() - started) / 60,
        "reward_first": sum(rewards[:part]) / part,
        "reward_last": sum(rewards[-part:]) / part,
        "samples_lost": SAMPLES * num_steps - sum(counts),
        "not_once": not_once(dispatched(folder)[0], rows_of_data),
        "memory": held_by_step(seen),
        **growths(seen, answers),
    }


def growths(seen: list[dict[str, Held]], answers: str) -> dict[str, float]:
    """Of memory and of open files, of any process."""
    warm = WARM_STEPS_OF_AGENTS if answers == "agent" else WARM_STEPS
    return {
        "growth": growth(seen, lambda each: each.memory, warm),
        "files": growth(seen, lambda each: each.files, warm),
    }


def held_by_step(seen: list[dict[str, Held]]) -> list[dict]:
    return [{name: asdict(each) for name, each in step.items()} for step in seen]


def watched(scene: Scene, seen: list[dict[str, Held]]) -> int:
    """The step, after noting once a step what every process holds."""
    step = scene.step()
    while len(seen) < step:
        seen.append(held(scene.job))
    return step


def growth(
    seen: list[dict[str, Held]],
    of: Callable[[Held], float],
    warm: int,
) -> float:
    """Largest ratio of the least that a process held in its last ten steps, requests come and go, to
    that of ten after its first; 1 when none lived so long."""
    ratios = [1.0]
    for name in {name for sample in seen for name in sample}:
        life = [of(sample[name]) for sample in seen if name in sample][warm:]
        if len(life) > AT_REST:
            ratios.append(min(life[-AT_REST:]) / max(min(life[:AT_REST]), 1))
    return max(ratios)


def drawn(num_faults: int) -> list[str]:
    """Names of faults: each kind once a round, in any order, and one of its faults."""
    kinds: dict[str, list[str]] = {}
    for name in FAULTS:
        kinds.setdefault(kind_of(name), []).append(name)
    names: list[str] = []
    while len(names) < num_faults:
        names += [random.choice(kinds[kind]) for kind in random.sample(list(kinds), len(kinds))]
    return names[:num_faults]


def kind_of(name: str) -> str:
    return name.split()[0].removesuffix("'s")


def draw_picture(result: dict, target: Path) -> None:
    """What every process held by step, from its start to its end; gray lines are faults."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seen, colors, shades = result["memory"], {}, pyplot.get_cmap("tab20")
    figure, both = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6))
    for axes, of, unit in zip(both, ("memory", "files"), ("MiB", "open files"), strict=True):
        for name in sorted({name for sample in seen for name in sample}):
            kind = name.rpartition(" ")[0]
            life = [(i, held[name][of]) for i, held in enumerate(seen, 1) if name in held]
            label = None if kind in colors else kind
            color = colors.setdefault(kind, shades(len(colors)))
            axes.plot(*zip(*life, strict=True), color=color, linewidth=0.8, label=label)
        for fault in result["faults"]:
            axes.axvline(fault["step"], color="0.85", linewidth=0.5, zorder=0)
        axes.set_ylabel(f"{unit} of a process")
        axes.set_yscale("log")
    both[1].set_xlabel("step")
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    figure.legend(fontsize=6, ncol=7, loc="upper center")
    figure.savefig(target, dpi=64)


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
    names = drawn(len(steps))
    if args.engines:
        names = [ENGINES_KILLED[number % 2] for number in range(len(steps))]
    run = args.folder / "run"
    result = soak(run, args.steps, args.every, names, args.answers)
    lines = table(result)
    if args.engines or args.max_staleness:
        alone = args.folder / "undisturbed"
        done = megagrpo(
            "run",
            write_experiment(alone, **settings_of(args.steps, args.answers)),
            timeout_s=LIMIT_S + STEP_S * args.steps,
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
    draw_picture(result, RESULTS / f"{name}.png")
    learned = result["reward_last"] > result["reward_first"]
    assert (
        result["samples_lost"] == result["not_once"] == 0
        and max(result["growth"], result["files"]) <= GROWTH
        and learned
    ), "see the table"


def table(result: dict) -> list[tuple[str, str]]:
    slowest = max((row["recovered_s"] for row in result["faults"]), default=0.0)
    names = {"reward": f"{result['answers']} hung", "network": "network slow", "disk": "disk full"}
    kinds = Counter(kind_of(row["fault"]) for row in result["faults"])
    rise = result["reward_last"] - result["reward_first"]
    return [
        (
            "finished",
            f"{result['steps']} steps, {len(result['faults'])} faults, {result['minutes']:.1f} "
            "minutes",
        ),
        ("of these", ", ".join(f"{names.get(kind, kind)} {kinds[kind]}" for kind in sorted(kinds))),
        ("slowest recovery", f"{slowest:.1f} s"),
        ("samples lost", str(result["samples_lost"])),
        ("prompts trained on more than once in an epoch", str(result["not_once"])),
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
