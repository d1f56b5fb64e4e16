"""The lives of a run, start after start (tests/played_run.py), as a machine that hypothesis drives, and what must be
true after each start: each row once in order, at the rate of the schedule; the weights of an undisturbed run; every
finished step on disk, with its record; the exit status and the last line of docs/operate.md; no process left."""

import errno
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.checkpoint.folder import finished_checkpoints, step_of
from megagrpo.monitor.step_lines import read_step_lines
from megagrpo.monitor.step_log import read_metrics
from megagrpo.system.run_folder import RunFolder
from tests.dist.cases import SMALL
from tests.dist.workers.pool import RankPool
from tests.played_run import FAILS, KINDS, NOTHING, Event, Plan, one_start

NUM_ROWS = 40
MOST_STEPS = 9  # before rows come again
ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE)


@dataclass(frozen=True)
class Settings:
    """What a start may set differently from the one before. Two first: they change no result."""

    every: int = 25
    background: bool = False
    world: int = 1
    lr: float = 1e-3
    updates: int = 2
    num_steps: int = 4
    seed: int = 0
    staleness: int = 0
    reference: int = 0  # steps after which the KL's reference moves; 0: no KL

    @property
    def decides(self) -> tuple:
        """What decides the weights after a step."""
        return (self.world, self.lr, self.updates, self.num_steps, self.seed, self.staleness, self.reference)


class Lives:
    """Runs of one experiment, and what is known of it: the facts of a step, by what decides them."""

    def __init__(self, folder: Path, template: RankPool | None = None):
        self.folder, self.template = folder, template or RankPool()
        self.notes = folder / "notes"
        self.facts: dict[tuple, object] = {}
        self.kinds: dict[str, int] = {}  # how often an event happened
        self.starts = self.lives = 0
        self.model = str(folder / "model")
        make_tiny_model(TinyModelConfig(path=self.model, family="qwen3", **SMALL | {"num_layers": 1}), 0)
        rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(NUM_ROWS)]
        for name, part in (("train", rows), ("eval", rows[:3])):
            (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
        broken = f"    if Path({str(folder / 'notes' / 'broken')!r}).exists():\n        raise OSError('on purpose')\n"
        grader = f"from pathlib import Path\n\n\ndef grade(text, answer):\n{broken}"
        (folder / "gr.py").write_text(grader + "    return sum(map(ord, text)) % 2.0\n")

    def begin(self) -> "Life":
        """A run that has not started yet."""
        self.lives += 1
        return Life(self, self.folder / f"run{self.lives}")

    def experiment(self, run: Path, settings: Settings) -> dict:
        return {
            "name": "life",
            "output_dir": str(run),
            "seed": settings.seed,
            "model": {"path": self.model},
            "data": {"path": str(self.folder / "train.jsonl"), "max_prompt_tokens": 8},
            "eval": {"data": {"path": str(self.folder / "eval.jsonl")}, "every": 2},
            "sampling": {"max_response_tokens": 8},
            "reward": {"grader": f"{self.folder}/gr.py:grade", "workers": 1},
            "train": {"num_steps": settings.num_steps, "num_prompts_per_step": 4, "group_size": 2,
                      "num_updates_per_step": settings.updates, "max_bad_fraction": 0.0},
            "algorithm": {"loss": {"name": "ppo_clip"}, "mismatch": {"alarm": None, "weight": {"name": "tis"}}}
            | ({"kl": {"loss_coef": 0.1, "reference_every": settings.reference}} if settings.reference else {}),
            "actor": {"world_size": settings.world, "threads": 1, "max_restarts": 1, "deadline_s": 60,
                      "optimizer": {"lr": settings.lr, "lr_schedule": "linear"}},
            "rollout": {"step_timeout_s": 60, "start_timeout_s": 60, "max_staleness": settings.staleness},
            "weights": {"timeout_s": 50},
            "checkpoint": {"every": settings.every, "asynchronous": settings.background},
            "log": {"tensorboard": False},
        }  # fmt: skip


class Life:
    """One run folder, what was done in it, and what must be true of it after each start.

    history: what decides the weights after each of its steps, see `Settings.decides`.
    """

    def __init__(self, lives: Lives, run: Path):
        self.lives, self.run, self.folder = lives, run, RunFolder(run)
        self.history: list[tuple] = []
        self.cut_lines: set[int] = set()  # steps whose metrics were cut by hand
        self.broken = ""  # why a start must refuse

    # What a start does, and what must be true of it.

    def start(self, settings: Settings, event: Event = NOTHING) -> dict:
        """Starts the run and checks how it ended. AssertionError with what the start printed."""
        saved, record = self.saved(), self.record()
        lives = self.lives
        lives.starts += 1
        shutil.rmtree(lives.notes, ignore_errors=True)
        lives.notes.mkdir()
        config = lives.folder / "experiment.yaml"
        config.write_text(json.dumps(lives.experiment(self.run, settings)))
        refused = self.refusal(settings)
        plan = Plan(str(config), str(self.run), event, str(lives.notes))
        (said,) = lives.template.run(1, one_start, plan)
        kind = event.kind if said["happened"] else "nothing"
        lives.kinds[kind] = lives.kinds.get(kind, 0) + 1
        try:
            assert said["status"] is not None, "no end"
            assert not said["left"], f"processes that are left: {said['left']}"
            if refused:
                assert said["status"] in (1, 2), f"status {said['status']}, but {refused}"
                assert (self.saved(), self.record()) == (saved, record), f"changed, although {refused}"
            else:
                first = self.walk(settings, saved)
                self.cut_lines = {step for step in self.cut_lines if step <= first}
                self.judge_end(said, settings, event, max(saved, default=0))
                self.judge_record(record, first)
        except AssertionError as exc:
            logs = (self.folder.log("trainer"),)
            ends = [path.read_text(errors="replace")[-2500:] for path in logs if path.exists()]
            print(f"{str(exc)[:200]}: {settings} {event}", file=sys.stderr, flush=True)
            raise AssertionError(
                f"{exc}\n{settings} {event}\nsaved before {saved}, now {self.saved()}, record "
                f"{sorted(self.record())}\n{said}\n{said['text'][-2500:]}\n{''.join(ends)}"
            ) from None
        return said

    def refusal(self, settings: Settings) -> str:
        """Why a start with these settings must change nothing; "" if it must not refuse."""
        newest = max(self.saved(), default=None)
        if self.broken or newest is None:
            return self.broken
        state = json.loads((self.folder.checkpoints / f"step_{newest:06d}" / "state.json").read_text())
        if newest < settings.num_steps and not state["reshardable"] and state["layout"]["ranks"] != settings.world:
            return "its checkpoint is of another layout"
        if newest < settings.num_steps and self.history[:newest] and self.history[0][4] != settings.seed:
            return "its rows have another order"
        return ""

    def walk(self, settings: Settings, saved: list[int]) -> int:
        """Follows the weights that the start published; returns after which step it began. Weights are
        a function of what decided the steps before."""
        path = self.lives.notes / "published"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        before, first = None, max(saved, default=0)
        for start, version, digest in lines:
            if start != before:
                expected = first if before is None else version
                assert version == expected <= len(self.history), f"goes on from {version}, not {expected}"
                self.history = self.history[:version]
                before = start
            else:
                assert version == len(self.history) + 1, f"publishes {version} after {len(self.history)}"
                self.history.append(settings.decides)
            self.known(version, "digest", digest)
        self.history = self.history[: max([first, *(version for _, version, _ in lines)])]
        return first

    def known(self, step: int, name: str, value: object) -> None:
        """Compares a fact of a step with what it was in any other life of these settings."""
        key = (name, *self.history[:step])
        other = self.lives.facts.setdefault(key, value)
        assert other == value, f"{name} of step {step} differs from another run's: {value} and {other}"

    def judge_end(self, said: dict, settings: Settings, event: Event, before: int) -> None:
        """The exit status and the last line by docs/operate.md, and which steps are saved."""
        status, kind, done = said["status"], event.kind, len(self.history)
        newest = max(self.saved(), default=0)
        happened = said["happened"]
        allowed = {
            "usr1": {85, 0}, "storm": {85, 0}, "int": {85, 0}, "int int": {130, 85, 0}, "stop": {86, 0},
            "time limit": {85, 137, 0}, "term": {143}, "stop --now": {143}, "kill rank": {0}, "kill all": {137},
            "save": {1}, "record": {0, 1}, "evaluation": {1}, "publish": {1}, "grader": {1},
        }[kind] if happened else {0}  # fmt: skip
        if kind == "int" and done == before:
            allowed.add(130)  # at once, because no step had begun
        assert status in allowed, f"status {status}, allowed {allowed}"
        assert newest >= before, f"checkpoint {before} disappeared"
        if status == 0:
            assert newest == done >= settings.num_steps, f"ended well after {done} steps, saved {newest}"
        if status in (85, 86):
            words = re.findall(r"saved after step (\d+); the same command resumes", said["text"].splitlines()[-1])
            assert words == [str(newest)] and newest == done, f"says {words}, saved {newest}, done {done}"
        if status == 1:
            assert "whole log: " in said["text"].splitlines()[-1], "no reason"
            if kind in FAILS:
                assert newest == done, f"{done} steps are done, {newest} saved"
        late = settings.every if settings.background else 0
        due = max(done - 1, 0) // settings.every * settings.every - late
        assert newest >= due or kind == "save", f"{done} steps are done, {newest} saved, {due} were due"
        if status in (0, 85, 86) or kind in FAILS:
            assert self.record().keys() >= set(range(1, done + 1)), f"record of {sorted(self.record())}"
        if status == 0 and done == settings.num_steps:  # else the start had nothing to do, and says so
            assert "eval/accuracy" in read_metrics(self.folder)[-1], "the last evaluation is missing"

    def judge_record(self, before: dict[int, dict], first: int) -> None:
        """Each saved step has its record, each row once in order, trained at the rate of the schedule;
        nothing of an earlier start is lost but what came after the checkpoint."""
        record, newest = self.record(), max(self.saved(), default=0)
        updates = 0
        for step in range(1, newest + 1):
            settings = Settings(*(None,) * 2, *self.history[step - 1])
            assert step in record, f"step {step} is saved and has no record"
            self.known(step, "record", {key: value for key, value in record[step].items() if key != "lr"})
            updates += settings.updates
            last = updates + (settings.num_steps - step) * settings.updates
            rate = settings.lr * (1 - (updates - 1) / max(last - 1, 1))
            found = record[step]["lr"]
            assert found is None or abs(found - rate) < 1e-9, f"step {step} with rate {found}, not {rate}"
        rows = [row for step in range(1, newest + 1) for row in record[step]["rows"]]
        assert len(set(rows)) == len(rows) == 4 * newest, f"rows {rows}"
        for step in before:
            if step <= first:
                assert record.get(step) == before[step], f"the record of step {step} changed"
        if first == 0 and before and (self.lives.notes / "published").exists():
            aside = [RunFolder(path) for path in self.run.glob("unsaved_*")]
            kept = [step for folder in aside for step in folder.rollout_files()]
            assert set(before) <= {*kept, *record}, f"of {sorted(before)} only {kept} were kept"

    def saved(self) -> list[int]:
        return [step_of(path) for path in finished_checkpoints(self.folder.checkpoints)]

    def record(self) -> dict[int, dict]:
        """Of each step that has all of its record: what is the same in every run, and the rate."""
        metrics = {entry["step"]: entry for entry in read_metrics(self.folder)} if self.folder.metrics.exists() else {}
        trained: dict[int, int] = {}
        for path in self.folder.trained_files().values():
            for line in read_step_lines(path):
                trained[line["step"]] = trained.get(line["step"], 0) + 1
        found = {}
        for step, files in self.folder.rollout_files().items():
            groups = [json.loads(line) for path in files.values() for line in path.read_text().splitlines()]
            groups.sort(key=lambda group: group["group_id"])
            texts = [[sample["text"] for sample in group["samples"]] for group in groups]
            entry = metrics.get(step, {})
            if trained.get(step) == len(files) and (entry or step in self.cut_lines):
                rows = [group["prompt_id"] for group in groups]
                found[step] = {"rows": rows, "texts": texts, "lr": entry.get("optim/lr")}
        return found

    # What a user or a disk does between two starts.

    def lose(self) -> None:
        """All checkpoints move away."""
        if self.saved() and not self.broken:
            self.folder.checkpoints.rename(self.run / "moved")
            self.broken = "its checkpoints are gone"

    def purge(self) -> None:
        """The newest checkpoint is removed."""
        if self.saved() and not self.broken:
            newest = finished_checkpoints(self.folder.checkpoints)[-1]
            newest.rename(self.run / "purged")
            self.broken = "its newest checkpoint is gone"

    def cut(self, number: int) -> None:
        """A file of the newest checkpoint loses its end."""
        if self.saved() and not self.broken:
            newest = finished_checkpoints(self.folder.checkpoints)[-1]
            files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size > 1)
            os.truncate(files[number % len(files)], files[number % len(files)].stat().st_size // 2)
            self.broken = f"{files[number % len(files)]} is cut"

    def accept(self) -> None:
        """The user goes on from what is left, as the messages and docs/checkpoints.md say."""
        if self.broken:
            if "is cut" in self.broken:
                newest = finished_checkpoints(self.folder.checkpoints)[-1]
                newest.rename(newest.with_name(f"cut_{newest.name}"))
            self.folder.last_checkpoint.unlink()
            self.broken = ""

    def put_back(self) -> None:
        """Or puts the checkpoints back."""
        if self.broken.startswith("its checkpoints"):
            (self.run / "moved").rename(self.folder.checkpoints)
            self.broken = ""

    def cut_metrics(self) -> None:
        """The last line of metrics.jsonl loses its end, as by a node that dies."""
        if self.folder.metrics.exists() and (lines := list(read_step_lines(self.folder.metrics))):
            os.truncate(self.folder.metrics, self.folder.metrics.stat().st_size - 3)
            self.cut_lines.add(lines[-1]["step"])


class LifeMachine(RuleBasedStateMachine):
    """Draws starts, what happens to them, and what happens between them."""

    lives: Lives  # set by who runs it

    def __init__(self) -> None:
        super().__init__()
        self.life, self.fails = self.lives.begin(), False

    @rule(
        settings=st.builds(
            Settings,
            every=st.sampled_from((25, 1, 2)),
            background=st.booleans(),
            world=st.sampled_from((1, 1, 1, 2)),
            lr=st.sampled_from((1e-3, 5e-4)),
            updates=st.sampled_from((2, 1)),
            num_steps=st.sampled_from((4, 5, 6)),
            seed=st.sampled_from((0, 0, 0, 0, 1)),
            staleness=st.sampled_from((0, 2)),
        ),
        kind=st.sampled_from(KINDS),
        call=st.integers(1, 60),
        rank=st.integers(0, 1),
        error=st.sampled_from(ERRORS),
    )
    def start(self, settings: Settings, kind: str, call: int, rank: int, error: int) -> None:
        at = 1 + call % 5 if kind in FAILS else call
        if self.life.broken:  # a run that has ended does not look
            settings = replace(settings, num_steps=MOST_STEPS)
        self.fails = True
        self.life.start(settings, Event(kind, at, rank, error))
        self.fails = False

    @rule(number=st.integers(0, 20), way=st.sampled_from(("lose", "purge", "cut", "cut_metrics")))
    def damage(self, number: int, way: str) -> None:
        getattr(self.life, way)(*[number] * (way == "cut"))
        if self.life.broken:  # nobody has seen it before the next start
            self.fails = True
            self.life.start(Settings(num_steps=MOST_STEPS))
            self.fails = False

    @rule(way=st.sampled_from(("accept", "put_back")))
    def mend(self, way: str) -> None:
        getattr(self.life, way)()

    def teardown(self) -> None:
        """Whatever happened, the run can be finished."""
        life = self.life
        if not self.fails:
            life.accept()
            kept = {}
            if life.history:
                world, *_, seed, _ = life.history[-1]
                kept = {"world": world, "seed": seed}
            life.start(Settings(num_steps=max(4, len(life.history)), **kept))
        shutil.rmtree(life.run, ignore_errors=True)
