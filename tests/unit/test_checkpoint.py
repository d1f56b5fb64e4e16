"""Which checkpoints make room for a new one, and where a start takes its state from."""

import json
import os
import shutil
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megagrpo.actor import start as starting
from megagrpo.actor.megatron_actor import learning_rate
from megagrpo.actor.start import plan_schedule, steps_in_all
from megagrpo.checkpoint import resume as beginning
from megagrpo.checkpoint import save as checkpoint
from megagrpo.checkpoint.folder import data_problem, is_reshardable, latest, restore_replaced
from megagrpo.checkpoint.groups import write_groups
from megagrpo.checkpoint.save import Checkpointer, PendingSave, RunIdentity, load
from megagrpo.config.schema import CheckpointConfig, OptimizerConfig
from megagrpo.mesh import LeaderError, make_mesh
from megagrpo.types import AlgoState, Outcome, Prompt, RolloutGroup, Sample, TrainState
from tests.experiments import experiment

MESH = make_mesh(0, 1, torch.device("cpu"), 60.0)
LAYOUT = {"ranks": 1, "tp": 1}
ANY = RunIdentity({}, LAYOUT)


class Plan:
    """Writes one file, when it may, or fails with a reason."""

    def __init__(self, folder: Path, reshardable: bool = True, gate=None, fault: str = "", size: int = 7):
        self.file, self.reshardable, self.gate, self.fault = (folder / "weights", reshardable, gate, fault)
        self.content = b"weights".ljust(size)

    def write(self) -> dict[Path, tuple[int, int]]:
        if self.gate is not None:
            self.gate.wait()
        if self.fault == "write":
            raise OSError("disk full")
        self.file.write_bytes(self.content)
        return {self.file: (len(self.content), zlib.crc32(self.content))}

    def finish(self) -> None:
        if self.fault == "finish":
            raise OSError("disk full")


@pytest.mark.parametrize(
    ("there", "keep", "left"),
    [
        ([10, 12, 14], 2, [14, 17]),
        ([10], 5, [10, 17]),
        ([10, 12, 14, 16], 5, [10, 12, 14, 16, 17]),
        (["step_000020.partial", 10], 1, [17]),  # an interrupted save of a history that was left
        ([100, 120], 2, [17, 100, 120]),  # the new one never goes
    ],
)
def test_the_newest_stays(tmp_path: Path, there, keep, left):
    for name in there:
        (tmp_path / (name if isinstance(name, str) else f"step_{name:06d}")).mkdir()
    folder = PendingSave(tmp_path, TrainState(step=17), ANY, CheckpointConfig(keep=keep), Plan, MESH).finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:06d}" for step in left]
    assert (folder / "manifest.json").is_file() and latest(tmp_path, at_most=17) == folder


def test_only_a_steps_own_name_is_a_checkpoint(tmp_path: Path):
    """A user sets one aside, as layout_problem proposes; numbers are compared as numbers."""
    for name in ("step_000010", "step_000020.bad", "step_000005.tar", "step_1000000"):
        (tmp_path / name).mkdir()
    assert latest(tmp_path).name == "step_1000000"
    assert latest(tmp_path, at_most=999_999).name == "step_000010"
    PendingSave(tmp_path, TrainState(step=1_000_001), ANY, CheckpointConfig(keep=2), Plan, MESH).finish()
    left = {"step_000020.bad", "step_000005.tar", "step_1000000", "step_1000001"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_replacement_that_fails_or_is_killed_leaves_the_checkpoint(tmp_path: Path, monkeypatch):
    def save() -> Path:
        options = CheckpointConfig(keep=1)
        return PendingSave(tmp_path, TrainState(step=17), ANY, options, Plan, MESH).finish()

    folder = save()
    (folder / "mark").touch()
    rename = os.replace

    def full_disk(source: Path, target: Path) -> None:
        if str(source).endswith("17.partial"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_disk)
        with pytest.raises(LeaderError, match="Input/output error"):
            save()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000017"]
    assert (folder / "mark").exists()
    rename(folder, tmp_path / "step_000017.replaced.partial")  # killed between the two renames
    restore_replaced(tmp_path)
    assert (folder / "mark").exists()
    assert not (save() / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000017"]


def test_a_checkpoint_is_on_disk_before_older_ones_go(tmp_path: Path, monkeypatch):
    (tmp_path / "step_000010").mkdir()
    done: list[str] = []
    monkeypatch.setattr(checkpoint, "sync", lambda path: done.append(path.name))
    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **more: done.append(f"-{path.name}") or remove(path, **more))
    options = CheckpointConfig(keep=1)
    PendingSave(tmp_path, TrainState(step=17), ANY, options, Plan, MESH).finish()
    synced = done[: done.index("-step_000010")]
    assert {"state.json", "actor", "step_000017.partial", tmp_path.name} <= set(synced)


@pytest.mark.parametrize("fault", ["plan", "write", "finish"])
def test_a_failure_at_any_moment_leaves_nothing(tmp_path: Path, fault: str):
    def plan(folder: Path) -> Plan:
        if fault == "plan":
            raise OSError("disk full")
        return Plan(folder, fault=fault)

    (tmp_path / "step_000010").mkdir()
    message = r"step_000017: rank 0 could not write, \d+ MiB are free there: OSError: disk full"
    with pytest.raises(LeaderError, match=message):
        PendingSave(tmp_path, TrainState(step=17), ANY, CheckpointConfig(keep=1), plan, MESH).finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000010"]


def checkpointer(root: Path, plan=Plan, saved_step: int = 0, background: bool = False, **options) -> Checkpointer:
    options = CheckpointConfig(**{"keep": 9, **options})

    def export(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / f"from_{saved_step}").touch()

    return Checkpointer(options, root, ANY, plan, lambda state: state, MESH, 5, saved_step, background, export)


def saved(root: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in sorted(root.glob("step_*")) if path.suffix != ".partial"]


def test_what_is_saved_is_not_saved_again(tmp_path: Path):
    saver = checkpointer(tmp_path, saved_step=2, every=2)
    saver.on_schedule(TrainState(step=2))
    assert saved(tmp_path) == []
    saver.save_now(TrainState(step=3))
    saver.save_now(TrainState(step=3))
    assert saved(tmp_path) == [3]


def test_training_goes_on_while_a_save_is_written_and_the_next_waits_for_it(tmp_path: Path):
    gate = threading.Event()
    saver = checkpointer(tmp_path, lambda folder, _: Plan(folder, gate=gate), every=2, background=True)
    for step in (2, 3):
        saver.on_schedule(TrainState(step=step))
        assert saved(tmp_path) == []
    gate.set()
    saver.on_schedule(TrainState(step=4))
    assert saved(tmp_path) == [2]
    saver.on_schedule(TrainState(step=5))
    assert saved(tmp_path) == [2, 4, 5]


def forms(root: Path) -> dict[int, bool]:
    return {step: is_reshardable(root / f"step_{step:06d}") for step in saved(root)}


@pytest.mark.parametrize(
    ("choice", "expected"), [("last", [False, False, True]), ("always", [True] * 3), ("never", [False] * 3)]
)
def test_the_schedule_asks_for_every_second_step_and_the_last(tmp_path: Path, choice: str, expected: list[bool]):
    """Another layout can load the saves that checkpoint.reshardable chooses."""
    saver = checkpointer(tmp_path, every=2, reshardable=choice)
    for step in range(6):
        saver.on_schedule(TrainState(step=step))
        assert saved(tmp_path) == [n for n in (2, 4, 5) if n <= step]
    assert list(forms(tmp_path).values()) == expected
    manifest = json.loads((tmp_path / "step_000005" / "manifest.json").read_text())
    assert sorted(manifest) == ["actor/weights", "state.json"]


def test_a_stop_saves_the_step_for_any_layout_once(tmp_path: Path):
    planned = []

    def plan(folder: Path, reshardable: bool) -> Plan:
        planned.append(reshardable)
        return Plan(folder, reshardable)

    saver = checkpointer(tmp_path, plan, every=2)
    saver.on_schedule(TrainState(step=2))
    assert forms(tmp_path) == {2: False}
    for _ in range(2):
        saver.save_now(TrainState(step=2))
    assert forms(tmp_path) == {2: True} and planned == [False, True]
    checkpointer(tmp_path, plan, saved_step=2).save_now(TrainState(step=2))  # a start that is asked to stop at once
    assert planned == [False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_another_layout_is_refused_with_what_to_do(tmp_path: Path):
    for step, reshardable in ((1, True), (2, False)):
        plan = lambda folder, form=reshardable: Plan(folder, form)  # noqa: E731  # two of them
        folder = PendingSave(tmp_path, TrainState(step=step), ANY, CheckpointConfig(keep=9), plan, MESH).finish()
    other = RunIdentity({}, {"ranks": 4, "tp": 2})
    layouts = r"by its own layout alone \(ranks 1\), this run has another \(ranks 4, tp 2\)"
    what_to_do = r".*SIGUSR1 .*checkpoint.reshardable .*rename it to step_000002.old: step_000001 beside it"
    with pytest.raises(LeaderError, match="step_000002 can be loaded " + layouts + what_to_do):
        load(folder, other, lambda _: None, MESH)
    assert load(folder, ANY, lambda _: None, MESH).step == 2
    assert load(tmp_path / "step_000001", other, lambda _: None, MESH).step == 1
    renamed = folder.rename(tmp_path / "step_000002.old")  # as the message says, or copied by a user
    assert load(renamed, ANY, lambda _: None, MESH).step == 2


@pytest.mark.parametrize("deferred", [[], [[4, 1]]])
def test_state_of_a_setting_that_is_gone_is_refused_unless_it_is_empty(tmp_path: Path, deferred: list):
    folder = PendingSave(tmp_path, TrainState(step=2), ANY, CheckpointConfig(keep=1), Plan, MESH).finish()
    file, manifest = folder / "state.json", folder / "manifest.json"
    description = json.loads(file.read_text())
    description["train"]["deferred"] = deferred
    file.write_text(json.dumps(description))
    files = json.loads(manifest.read_text())
    files["state.json"] = [file.stat().st_size, zlib.crc32(file.read_bytes())]
    manifest.write_text(json.dumps(files))
    if not deferred:
        assert load(folder, ANY, lambda _: None, MESH) == TrainState(step=2)
        return
    with pytest.raises(LeaderError, match="has deferred of a setting that is gone: continue it with"):
        load(folder, ANY, lambda _: None, MESH)


def test_checksums_are_those_of_the_writer_and_its_files_are_not_read_again(tmp_path: Path, monkeypatch):
    read = []
    monkeypatch.setattr(checkpoint, "_crc", lambda path: read.append(path.name) or 0)
    folder = PendingSave(tmp_path, TrainState(step=1), ANY, CheckpointConfig(keep=1), Plan, MESH).finish()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["actor/weights"] == [7, zlib.crc32(b"weights")] and read == ["state.json"]


SAVED = TrainState(step=5, data_cursor=40, algo_state=AlgoState(kl_coef=0.3))


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Resumes an experiment with these `checkpoint` options; returns the state, the actor and what was read."""
    read = []
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)

    def load(folder: Path, identity: RunIdentity, *_) -> TrainState:
        own = folder.parent == tmp_path / "checkpoints"  # only its own data and order are compared
        assert ("seed" in identity.inputs) == (own and identity.model["resume"] != "other_data")
        if identity.rows:
            assert own
            raise ValueError("other rows")
        read.append(folder)
        return TrainState(**vars(SAVED))

    monkeypatch.setattr(beginning, "load", load)
    monkeypatch.setattr(beginning, "description", lambda folder: {"layout": {}})

    def resume(
        sections: dict | None = None, rows: Sequence = (), **options
    ) -> tuple[TrainState, SimpleNamespace, list[Path]]:
        sections = {"output_dir": str(tmp_path), "checkpoint": options} | (sections or {})
        config = experiment(**sections)
        actor = SimpleNamespace(mesh=make_mesh(0, 1, torch.device("cpu"), deadline_s=60), updates_done=5)
        source = beginning.find_checkpoint(config, actor.mesh)
        model = {"resume": config.checkpoint.resume}
        identity = RunIdentity(model, {}, rows, beginning.run_inputs(config, actor.mesh))
        return beginning.resume(config, source, identity, actor), actor, read

    return resume


@pytest.mark.parametrize(("own", "load"), [(False, None), (False, "elsewhere/step_000005"), (True, "elsewhere")])
def test_the_runs_own_checkpoint_comes_first_and_another_runs_weights_without_its_progress(start, tmp_path, own, load):
    folder = tmp_path / "checkpoints" / "step_000005"
    if own:
        folder.mkdir(parents=True)
    state, actor, read = start(load=load)
    assert (state, actor.updates_done) == ((SAVED, 5) if own else (TrainState(), 0 if load else 5))
    assert read == ([folder] if own else [Path(load)] if load else [])


def test_resume_never_is_about_an_earlier_start(start, tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "step_000005").mkdir(parents=True)
    with pytest.raises(ValueError, match="checkpoint.resume is never, but .*step_000005 is there"):
        start(resume="never")
    # ranks that start again, a job that was requeued
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert start(resume="never")[0] == SAVED


ROWS = [["data/a.jsonl", 6, "a6"], ["data/b.jsonl", 4, "b4"]]


@pytest.mark.parametrize(
    "now, said",
    [
        (ROWS, ""),
        ([["elsewhere/a.jsonl", *ROWS[0][1:]], ROWS[1]], ""),  # moved
        ([], ""),  # of a tool, which takes no prompts
        ([["data/a.jsonl", 8, "a8"], ROWS[1]], "6 rows in use then .*a.jsonl.*, 8 now"),
        ([ROWS[0], ["data/b.jsonl", 4, "x"]], "4 rows .*b.jsonl.*some of them others or elsewhere"),
        (ROWS[::-1], "6 rows in use then .*a.jsonl.*, 4 now .*b.jsonl"),
        (ROWS[:1], "4 rows in use then .*b.jsonl.*, 0 now .no file"),
        ([*ROWS, ["c.jsonl", 1, "c"]], "0 rows in use then .no file.*, 1 now .c.jsonl"),
    ],
)
def test_a_checkpoint_counts_in_the_rows_that_it_was_written_with(tmp_path, now, said):
    folder = PendingSave(tmp_path, SAVED, RunIdentity({}, LAYOUT, ROWS), CheckpointConfig(), Plan, MESH).finish()

    def loaded() -> TrainState:
        return load(folder, RunIdentity({}, LAYOUT, now), lambda part: None, MESH)

    if said:
        with pytest.raises(LeaderError, match=said) as raised:
            loaded()
        assert "checkpoint.resume: other_data" in str(raised.value)
    else:
        assert loaded() == SAVED
    state = folder / "state.json"
    without = json.loads(state.read_text())
    del without["rows"]
    state.write_text(json.dumps(without))
    assert not data_problem(folder, now), "of an earlier megagrpo"


def test_other_data_is_what_ends_a_start_unless_it_is_wanted(start, tmp_path):
    assert start(rows=ROWS, load="elsewhere/step_000005")[0] == TrainState()
    (tmp_path / "checkpoints" / "step_000005").mkdir(parents=True)
    with pytest.raises(ValueError, match="other rows"):
        start(rows=ROWS)
    assert start(rows=ROWS, resume="other_data")[0] == SAVED


@pytest.mark.parametrize("source", [None, Path("step_000005")])
@pytest.mark.parametrize("reference", [False, True])
def test_the_model_is_read_unless_a_checkpoint_overwrites_it(monkeypatch, source: Path | None, reference: bool):
    done = []
    monkeypatch.setattr(starting, "load_initial_weights", lambda actor, path, overwritten: done.append(overwritten))
    actor = SimpleNamespace(keep_reference=lambda: done.append("reference"))
    config = experiment(algorithm={"kl": {"loss_coef": 0.1}} if reference else {})
    starting.initial_weights(config, config.algorithm, source, actor)
    assert done == ([False, "reference"] if reference else [source is not None])


def group(version: int) -> RolloutGroup:
    return RolloutGroup(version, Prompt(0, "", (1,), ""), (Sample(0, (7,), (-1.0,), "stop", version, "7"),), ())


def keep_surplus(run: Path, groups: list[RolloutGroup]) -> None:
    """Writes what the next step is to take first into the run's checkpoint."""
    folder = run / "checkpoints" / "step_000005"
    folder.mkdir(parents=True, exist_ok=True)
    write_groups(folder / "surplus-00000.npz", groups)


DYNAMIC = {"dynamic_sampling": {}, "mismatch": {"weight": {"name": "tis"}}}


@pytest.mark.parametrize("staleness, young", [(4, [2, 3, 4]), (2, [3, 4]), (0, [4])])
def test_groups_too_old_for_a_smaller_bound_are_left_out(start, tmp_path, capsys, staleness, young):
    keep_surplus(tmp_path, [group(version) for version in (2, 3, 4)])
    state, *_ = start(sections={"rollout": {"max_staleness": staleness}, "algorithm": DYNAMIC})
    assert [group.samples[0].weight_version for group in state.surplus] == young
    assert [group.group_id for group in state.surplus] == young, "the ids that they were sampled with"
    assert ("are left out" in capsys.readouterr().out) == (len(young) < 3)


def test_a_rollout_without_tokens_makes_no_group_too_old(start, tmp_path):
    failed = replace(group(4), samples=(*group(4).samples, Sample(1, (), (), "stop", 0, "")))
    keep_surplus(tmp_path, [failed])
    assert start(sections={"algorithm": DYNAMIC})[0].surplus == [failed]


SCORE = Outcome("score", 1.0, parts={"gsm8k": Outcome("score", 1.0), "exact": Outcome("score", 0.0)})
GRADERS = {"graders": [{"grader": "gsm8k"}, {"grader": "exact"}]}


@pytest.mark.parametrize(
    ("advantage", "whole"),
    [("remax", {"greedy": group(4).samples[0], "greedy_outcome": SCORE}), ("gdpo", {"outcomes": (SCORE,)})],
)
def test_groups_without_what_another_advantage_needs_are_left_out(start, tmp_path, advantage, whole):
    """A step would end with numbers that are not finite, or without a grader's score, at every start again."""
    bare = replace(group(4), outcomes=(Outcome("score", 1.0),))
    keep_surplus(tmp_path, [bare, replace(bare, **whole)])
    algorithm = DYNAMIC | {"advantage": {"name": advantage}}
    assert start(sections={"algorithm": algorithm, "reward": GRADERS})[0].surplus == [replace(bare, **whole)]


@pytest.mark.parametrize(("wanted", "steps"), [(10, 20), (20, 15), (5, 30)])
def test_epochs_end_with_the_prompts_also_if_steps_took_other_numbers_of_them(wanted, steps):
    """Two epochs of 100 prompts, stopped after 10 steps of 10."""
    state = TrainState(step=10, data_cursor=100)
    config = experiment(train={"num_epochs": 2, "num_steps": None, "num_prompts_per_step": wanted})
    assert steps_in_all(config, 100, state) == steps


def test_the_schedule_ends_with_the_last_step_whatever_was_made_before():
    """Two of ten updates were skipped; then with another number of updates a step."""
    train = experiment(train={"num_updates_per_step": 2}).train
    actor = SimpleNamespace(updates_done=8)
    plan_schedule(actor, train, steps_left=3)
    assert actor.num_updates == 14
    options = OptimizerConfig(lr=1e-3, lr_schedule="linear", min_lr=1e-4)
    assert learning_rate(options, 13, actor.num_updates) == options.min_lr
    plan_schedule(actor, train.model_copy(update={"num_updates_per_step": 1}), steps_left=3)
    rates = [learning_rate(options, update, actor.num_updates) for update in (8, 9, 10)]
    assert rates[0] > rates[1] > rates[2] == options.min_lr


def test_more_groups_than_a_step_takes_would_get_too_old(start, tmp_path):
    keep_surplus(tmp_path, [group(4)] * 3)
    few = {"train": {"num_prompts_per_step": 3}, "algorithm": DYNAMIC}
    for staleness in (0, 2):
        with pytest.raises(ValueError, match=r"has 3 groups for the next step, .* is 3: take 4 or more"):
            start(sections=few | {"rollout": {"max_staleness": staleness}})


def test_groups_that_no_step_takes_are_left_out(start, tmp_path, capsys):
    """Without dynamic sampling they were kept for ever, by each rank and in each checkpoint."""
    keep_surplus(tmp_path, [group(4)] * 3)
    assert start(sections={"train": {"num_prompts_per_step": 3}})[0].surplus == []
    assert "3 groups that were sampled for a later step are left out" in capsys.readouterr().out


def test_another_runs_groups_are_not_read(start, tmp_path):
    """They may be gigabytes, of which the run takes nothing."""
    folder = tmp_path / "other" / "step_000005"
    folder.mkdir(parents=True)
    for name in ("surplus", "ahead"):
        (folder / f"{name}-00000.npz").write_bytes(b"not read")
    assert start(load=str(folder), sections={"algorithm": DYNAMIC})[0] == TrainState()


def test_a_run_begins_where_checkpoint_dir_says(start, tmp_path):
    scratch = tmp_path / "scratch"
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(LeaderError, match="checkpoint.dir: .*: move them there"):
        start(dir=str(scratch))
    (tmp_path / "checkpoints").rmdir()
    assert start(dir=str(scratch))[0] == TrainState()
    (scratch / "step_000005").mkdir()
    assert start(dir=str(scratch))[2] == [tmp_path / "checkpoints" / "step_000005"]
