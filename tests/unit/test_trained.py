"""The record of trained samples: what is in a line, and what a resumed run does to it."""

import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_run import made_batch, made_groups, make_run

from megagrpo.monitor.run_record import cut_record
from megagrpo.monitor.step_lines import BackgroundWriter, read_step_lines
from megagrpo.monitor.trained import TrainedLog
from megagrpo.system.run_folder import RunFolder


def test_a_resumed_run_replaces_what_it_makes_again(tmp_path):
    folder = make_run(tmp_path, num_steps=4)
    path = folder.trained_file(0)
    with path.open("a") as file:
        file.write('{"step": 5, "sta')  # the process was killed here
    before = path.read_text().splitlines()
    make_run(tmp_path, num_steps=6, start_step=2)
    after = path.read_text().splitlines()
    assert after[:2] == before[:2]
    assert [line["step"] for line in read_step_lines(path)] == [1, 2, 3, 4, 5, 6]
    other = folder.trained_file(1)
    other.write_text(path.read_text())
    cut_record(folder, 3)  # replica 1 is gone
    assert [line["step"] for line in read_step_lines(other)] == [1, 2, 3]
    make_run(tmp_path, num_steps=1)
    assert [line["step"] for line in read_step_lines(path)] == [1]


def test_copies_of_a_user_are_no_part_of_the_record(tmp_path):
    folder = make_run(tmp_path, num_steps=2)
    record = folder.rollout_files(), folder.trained_files()
    for path in (folder.rollout_file(1, 0), folder.trained_file(0)):
        for copy in (" copy", ".old"):
            shutil.copy(path, path.with_name(f"{path.stem}{copy}.jsonl"))
    assert (folder.rollout_files(), folder.trained_files()) == record
    cut_record(folder, 1)
    assert [line["step"] for line in read_step_lines(folder.trained_file(0))] == [1]


@pytest.mark.parametrize("left", ["metrics.jsonl", "rollouts", "trained"])
def test_whatever_is_left_of_a_record_without_a_checkpoint_is_kept(tmp_path, left):
    """Of a user who needed the space, or of a start that was killed while it moved them."""
    folder = make_run(tmp_path, num_steps=2)
    for name in {"metrics.jsonl", "rollouts", "trained"} - {left}:
        (tmp_path / name).rename(tmp_path / f"elsewhere {name}")
    cut_record(folder, 0)
    (aside,) = tmp_path.glob("unsaved_*")
    assert [path.name for path in aside.iterdir()] == [left]


def test_a_start_that_made_no_step_leaves_nothing_aside(tmp_path):
    folder = make_run(tmp_path, num_steps=0)
    folder.metrics.write_text('{"step": 0, "eval/accuracy": 0.5}\n')
    make_run(tmp_path, num_steps=0)
    assert not list(tmp_path.glob("unsaved_*")) and '"step": 0' in folder.metrics.read_text()


def test_a_broken_line_before_the_first_step_blocks_no_start(tmp_path):
    folder = make_run(tmp_path, num_steps=0)
    folder.metrics.write_text('\0\0{"step": 0}\n')
    cut_record(folder, 0)
    assert folder.metrics.exists() and not list(tmp_path.glob("unsaved_*"))


def test_a_move_that_is_killed_leaves_a_reason_to_go_on(tmp_path, monkeypatch):
    folder = make_run(tmp_path, num_steps=2)
    names = ["metrics.jsonl", "rollouts", "trained"]
    for killed in range(1, len(names)):
        rename, moved = Path.rename, []

        def until_killed(path, target, rename=rename, moved=moved, killed=killed):
            if len(moved) == killed:
                raise KeyboardInterrupt
            moved.append(path.name)
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", until_killed)
            patch.setattr(time, "strftime", lambda _, killed=killed: f"unsaved_{killed}")
            with pytest.raises(KeyboardInterrupt):
                cut_record(folder, 0)
        with monkeypatch.context() as patch:
            patch.setattr(time, "strftime", lambda _, killed=killed: f"unsaved_{killed}_again")
            cut_record(folder, 0)
        found = [path.name for path in tmp_path.glob(f"unsaved_{killed}*/*")]
        assert sorted(found) == names
        make_run(tmp_path, num_steps=2)


def test_broken_lines_and_failures_to_write_are_raised(tmp_path):
    writer = BackgroundWriter("test")
    writer.submit((tmp_path / "a" / "b").touch)
    with pytest.raises(FileNotFoundError):
        writer.close()
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert list(read_step_lines(path)) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"step": 2, oops}\n{"step": 3')
    with pytest.raises(ValueError, match=r"x\.jsonl:2: not a JSON line"):
        list(read_step_lines(path))
    path.write_text("hello\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:1: not a line of a step"):
        list(read_step_lines(path))


# ---- samples as the update saw them
# ----------------------------------------------------------------------------------


def trained(tmp_path, batches, num_groups: int = 1, logprobs: torch.Tensor | None = None) -> list[dict]:
    with closing(TrainedLog(RunFolder(tmp_path), 0, num_groups, lambda ids: [f"<{i}>" for i in ids])) as log:
        for step, batch in enumerate(batches, start=1):
            log.write(step, batch, batch.old_logprobs if logprobs is None else logprobs)
    return list(read_step_lines(RunFolder(tmp_path).trained_file(0)))


@pytest.mark.parametrize("steps_after", [0, 2])
def test_a_line_that_cannot_be_written_is_tried_again(tmp_path, capsys, steps_after):
    batch = made_batch(made_groups(1), difference=0.25)
    file, aside = RunFolder(tmp_path).trained_file(0), tmp_path / "aside"
    with closing(TrainedLog(RunFolder(tmp_path), 0, 1, lambda ids: map(str, ids))) as log:
        for step in range(1, 5 + steps_after):
            if step == 2:
                log.flush()
                file.rename(aside)
                file.mkdir()  # as on a file system that is gone
            log.write(step, batch, batch.old_logprobs)
            if step == 4:
                log.flush()
                file.rmdir()
                aside.write_text(aside.read_text() + '{"step": 2, "sample_i')  # as where a disk became full
                aside.rename(file)
    lines = list(read_step_lines(file))
    assert [line["step"] for line in lines] == list(range(1, 5 + steps_after))
    assert all(line["advantages"] == lines[0]["advantages"] for line in lines)
    assert capsys.readouterr().out.count(f"{file} is not written: ") == 1


def test_a_folder_that_is_removed_is_made_again(tmp_path):
    batch, folder = made_batch(made_groups(1)), RunFolder(tmp_path)
    with closing(TrainedLog(folder, 0, 1, lambda ids: map(str, ids))) as log:
        for step in (1, 2):
            log.write(step, batch, batch.old_logprobs)
            log.flush()
            if step == 1:
                shutil.rmtree(folder.trained)
    assert [line["step"] for line in read_step_lines(folder.trained_file(0))] == [2]


def test_half_a_character_is_written_as_json_escapes_it(tmp_path):
    batch, folder = made_batch(made_groups(1)), RunFolder(tmp_path)
    with closing(TrainedLog(folder, 0, 1, lambda ids: ["\ud83d" for _ in ids])) as log:
        log.write(1, batch, batch.old_logprobs)
    (line,) = read_step_lines(folder.trained_file(0))
    assert set(line["pieces"].values()) == {"\ud83d"}


def test_lines_that_can_never_be_written_take_no_more_and_more_memory(tmp_path):
    batch, file = made_batch(made_groups(1)), RunFolder(tmp_path).trained_file(0)
    with closing(TrainedLog(RunFolder(tmp_path), 0, 1, lambda ids: map(str, ids))) as log:
        file.mkdir(parents=True)
        for step in range(1, 31):
            log.write(step, batch, batch.old_logprobs)
        log.flush()
        file.rmdir()
    assert [line["step"] for line in read_step_lines(file)] == list(range(11, 31))


def test_advantages_of_all_and_tokens_of_the_first_groups(tmp_path):
    batch = made_batch(made_groups(1), difference=0.25)
    batch.advantages[batch.starts[1] + 3] = 1.0  # one that differs by token: its mean is kept
    first, second = trained(tmp_path, [batch, batch])
    assert first["sample_ids"] == list(range(12))
    assert first["advantages"][:4] == [1.5, (1.0 - 0.5 - 0.5) / 3, -1.0, 0.0]
    ids = [[5, 6], [5, 6, 9]]
    tokens = [{"sample_id": i, "ids": own, "difference": [0.25] * len(own)} for i, own in enumerate(ids)]
    assert first["tokens"][:2] == tokens and len(first["tokens"]) == 4
    assert first["pieces"] == {"5": "<5>", "6": "<6>", "9": "<9>"} and second["pieces"] == {}


def test_untrained_tokens_have_no_difference_and_the_updates_own_forward_serves_too(tmp_path):
    batch = made_batch(made_groups(1))
    seen = batch.old_logprobs.clone()
    seen[batch.starts[1] : batch.starts[2]] = torch.nan  # no update took that sample
    (line,) = trained(tmp_path, [replace(batch, old_logprobs=None)], logprobs=seen)
    assert [sample["difference"] for sample in line["tokens"][:2]] == [[0.002, 0.002], [None, None, None]]
    batch.loss_mask[batch.starts[0] + 3] = False  # a tool's token
    batch.loss_mask[batch.starts[2] : batch.starts[3]] = False
    masked = trained(tmp_path, [batch])[-1]
    assert masked["tokens"][0]["difference"] == [None, 0.002] and masked["tokens"][2]["difference"] == [None, None]
    assert masked["advantages"][2] is None
