"""Draws lives of a run, start after start, and looks for one that breaks what must be true.

    python bench/lifecycles.py [--minutes 20] [--seed 0] [--planted]

tests/lifecycles.py says what a start is, what happens to it, and what must be true afterwards. A life
that breaks it is shrunk by hypothesis and printed as calls. With --planted it also puts faults back
that the package once had, each in a copy of the repository, and counts the lives until one finds it.
Writes bench/results/lifecycles.{json,md}; exits with 1 if a fault was found that is not planted, or a
planted one was not.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, provenance, write_results

sys.path.insert(0, str(ROOT))

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from tests.lifecycles import LifeMachine, Lives, Settings

STEPS = 5  # starts and damages of a life, at most
OF_A_SEED = 8  # lives
PLANTED_MINUTES = 3.0  # to find one
COPIED = ("megagrpo", "tests", "bench", "examples", "pyproject.toml")


@dataclass(frozen=True)
class Planted:
    """A fault that the package once had: texts of a file that occur once, and what they become."""

    name: str
    file: str
    texts: dict[str, str]


PLANTED = (
    Planted(
        "a second USR1 takes the grant away",
        "system/stop_request.py",
        {"else self._made).touch()": "else self._made).touch(); self._granted.unlink(missing_ok=True)"},
    ),
    Planted(
        "the learning rate counts this start's updates for all steps",
        "actor/start.py",
        {"actor.updates_done + steps_left * train": "train.num_steps * train"},
    ),
    Planted(
        "no save before an evaluation's error leaves the loop",
        "loop/run.py",
        {"self.state.step > self.recording.start_step": 'self.state.step > self.recording.start_step '
         'and "evaluate" not in str(stopped)'},
    ),
    Planted(
        "the record of a folder whose checkpoints are gone is wiped",
        "",
        {
            "checkpoint/folder.py:if name and not any(": "if False and not any(",
            "monitor/run_record.py:if num_steps == 0 and made": "if False and made",
        },
    ),
    Planted(
        "a background checkpoint is abandoned at an error",
        "loop/run.py",
        {
            "self.state.step > self.recording.start_step": "self.state.step > self.recording.start_step "
            "and self.checkpointer._pending is None",
            "                self.checkpointer.complete()\n            except": "            except",
        },
    ),
)  # fmt: skip


def search(lives: Lives, seed: int, phases: tuple[hypothesis.Phase, ...]) -> str:
    """Draws lives; returns the life that breaks something, as calls, with the reason, or ""."""

    @hypothesis.seed(seed)
    class Machine(LifeMachine):
        pass

    Machine.lives = lives
    options = hypothesis.settings(
        max_examples=OF_A_SEED,
        stateful_step_count=STEPS,
        phases=phases,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    try:
        run_state_machine_as_test(Machine, settings=options)
    except Exception as exc:
        return "\n".join([str(exc), *getattr(exc, "__notes__", ())])
    return ""


def draw(seed: int, minutes: float, first_only: bool) -> dict:
    """Draws lives for some minutes, or until one breaks something, which is then not shrunk."""
    phases = (hypothesis.Phase.generate, *(() if first_only else (hypothesis.Phase.shrink,)))
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="lifecycles-") as folder:
        lives = Lives(Path(folder))
        try:
            lives.begin().start(Settings(num_steps=6))
            ends, started = time.monotonic() + 60 * minutes, time.monotonic()
            while time.monotonic() < ends and not (found and first_only):
                problem = search(lives, seed, phases)
                print(
                    f"seed {seed}: {lives.lives} lives, {lives.starts} starts\n{problem}",
                    flush=True,
                )
                found += [f"seed {seed}: {problem}"] * bool(problem)
                seed += 1
        finally:
            lives.template.stop()
    minutes = (time.monotonic() - started) / 60
    return {
        "lives": lives.lives,
        "starts": lives.starts,
        "kinds": lives.kinds,
        "minutes": minutes,
        "found": found,
    }


def plant(fault: Planted, seed: int) -> dict:
    """What a search in a copy of the repository with this fault finds first."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                left_out = shutil.ignore_patterns("__pycache__", "results", "runs")
                shutil.copytree(source, Path(folder, name), ignore=left_out)
            else:
                shutil.copy(source, folder)
        for key, new in fault.texts.items():
            file, _, old = key.rpartition(":") if not fault.file else (fault.file, "", key)
            path = Path(folder, "megagrpo", file)
            text = path.read_text()
            assert text.count(old) == 1, (
                f"{fault.name}: {old!r} occurs {text.count(old)} times in {file}"
            )
            path.write_text(text.replace(old, new))
        out = Path(folder, "found.json")
        words = ["--seed", str(seed), "--minutes", str(PLANTED_MINUTES), "--first", str(out)]
        subprocess.run(
            [sys.executable, str(Path(folder, "bench", "lifecycles.py")), *words],
            cwd=folder, env=os.environ | {"PYTHONPATH": folder}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return json.loads(out.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--planted", action="store_true", help="also put faults back")
    parser.add_argument("--first", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    result = draw(args.seed, args.minutes, args.first is not None)
    if args.first is not None:
        args.first.write_text(json.dumps(result))
        return 0
    lines = [
        ("lives drawn, with those of shrinking", str(result["lives"])),
        ("starts", str(result["starts"])),
        ("what ended them", ", ".join(f"{kind} {n}" for kind, n in Counter(result["kinds"]).most_common())),
        ("minutes", f"{result['minutes']:.0f}"),
        ("first seed", str(args.seed)),
        ("faults found", str(len(result["found"]))),
    ]  # fmt: skip
    missed = 0
    result["planted"] = {}
    for fault in PLANTED if args.planted else ():
        one = plant(fault, args.seed)
        result["planted"][fault.name] = one
        text = f"found by life {one['lives']}, start {one['starts']}"
        if one["found"]:
            text += f": {re.sub(r'^seed [0-9]+: ', '', one['found'][0]).splitlines()[0]}"
        else:
            text, missed = f"not found by {one['lives']} lives", missed + 1
        lines.append((f"put back: {fault.name}", text))
        print(lines[-1], flush=True)
    write_results("lifecycles", provenance() | result, ("what", "figure"), lines)
    return int(bool(result["found"] or missed))


if __name__ == "__main__":
    sys.exit(main())
