"""The timeline and the record of trained samples: what is in a line, what bounds it, what a resumed
run does to it."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from made_run import made_batch, made_groups, make_run

from megagrpo.monitor import timeline as module
from megagrpo.monitor.step_lines import StepLines, read_step_lines
from megagrpo.monitor.timeline import Timeline, is_between
from megagrpo.monitor.trained import TrainedLog
from megagrpo.system.run_folder import RunFolder


def lines(folder: RunFolder, rank: int = 0) -> list[dict]:
    return list(read_step_lines(folder.timeline_file(rank)))


def recorded(tmp_path, monkeypatch, moments: list[float], work) -> dict:
    """The one line of what `work` does with a timeline whose clock says these moments."""
    clock = iter(moments)
    monkeypatch.setattr(module.time, "time", lambda: next(clock))
    with closing(Timeline(RunFolder(tmp_path), 0)) as timeline:
        work(timeline)
        monkeypatch.undo()
    (line,) = lines(RunFolder(tmp_path))
    return line


def test_phases_follow_one_another_without_a_gap(tmp_path, monkeypatch):
    def step(timeline):
        for phase in (
            "rollout",
            "what follows rollout",
            "publish",
            "publish",
            "what follows publish",
        ):
            timeline.mark(phase)
        timeline.end_step(12)

    line = recorded(tmp_path, monkeypatch, [100.0, 100.5, 103.0, 103.5, 105.0, 105.25], step)
    assert (line["step"], line["start"], line["end"]) == (12, 100.0, 5.25)
    names = (
        "what follows the record",
        "rollout",
        "what follows rollout",
        "publish",
        "what follows publish",
    )
    moments = itertools.pairwise((0.0, 0.5, 3.0, 3.5, 5.0, 5.25))
    assert line["phases"] == [[name, *times] for name, times in zip(names, moments, strict=True)]
    assert [is_between(name) for name, *_ in line["phases"]] == [True, False, True, False, True]


def test_requests_and_calls_belong_to_engines(tmp_path, monkeypatch):
    def step(timeline):
        timeline.request("engine-1", 11.0, 12.0, 5)
        timeline.request("engine-0", 10.5, 13.0, 7)
        timeline.request("", 10.0, 10.1, 0)
        for start in (14.0, 14.2, 14.4):  # three buckets are one call
            timeline.call("engine-0", "load", start, start + 0.1)
        timeline.call("engine-0", "digest", 15.0, 15.5)
        timeline.call("engine-1", "load", 14.0, 14.1)
        timeline.end_step(1)

    line = recorded(tmp_path, monkeypatch, [10.0, 16.0], step)
    assert line["engines"] == ["", "engine-0", "engine-1"]
    assert line["requests"] == [[0, 0.0, 0.1, 0], [1, 0.5, 3.0, 7], [2, 1.0, 2.0, 5]]
    assert line["calls"] == [[1, "load", 4.0, 4.5], [1, "digest", 5.0, 5.5], [2, "load", 4.0, 4.1]]
    assert (line["num_requests"], line["num_calls"]) == (3, 3)


def test_a_line_is_bounded_and_says_how_much_there_was(tmp_path):
    with closing(Timeline(RunFolder(tmp_path), 0)) as timeline:
        for i in range(5000):
            timeline.request("engine-0", 1.0 * i, i + 0.5, 3)
            timeline.call("engine-0", f"call {i}", 1.0 * i, i + 0.5)
        timeline.call(
            "engine-0", "call 1023", 6000.0, 6000.5
        )  # as the last one that is kept, but not consecutive
        timeline.end_step(1)
    (line,) = lines(RunFolder(tmp_path))
    assert (line["num_requests"], line["num_calls"], len(line["calls"])) == (5000, 5001, 1024)
    assert line["calls"][-1][1] == "call 1023" and line["calls"][-1][3] - line["calls"][-1][
        2
    ] == pytest.approx(0.5)
    starts = [start for _, start, *_ in line["requests"]]
    assert 256 < len(starts) <= 512 and {b - a for a, b in itertools.pairwise(starts)} == {10.0}
    assert os.path.getsize(RunFolder(tmp_path).timeline_file(0)) < 100_000


def test_many_threads_record_at_once_and_none_when_switched_off(tmp_path):
    for folder, enabled in ((tmp_path / "on", True), (tmp_path / "off", False)):
        timeline = Timeline(RunFolder(folder), 0, enabled=enabled)

        def work(number: int, timeline: Timeline = timeline) -> None:
            timeline.mark("rollout")
            for i in range(200):
                timeline.request(f"engine-{number}", i, i + 1, 1)
                if number == 0 and i % 20 == 0:
                    timeline.end_step(i)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
        timeline.end_step(1000)
        timeline.close()
    assert sum(line["num_requests"] for line in lines(RunFolder(tmp_path / "on"))) == 800
    assert not (tmp_path / "off").exists()


def test_a_resumed_run_replaces_what_it_makes_again(tmp_path):
    folder = make_run(tmp_path, num_steps=4)
    with folder.timeline_file(1).open("a") as file:
        file.write('{"step": 5, "sta')  # the process was killed here
    before = {rank: folder.timeline_file(rank).read_text().splitlines() for rank in range(2)}
    make_run(tmp_path, num_steps=6, start_step=2)
    for rank in range(2):
        after = folder.timeline_file(rank).read_text().splitlines()
        assert after[:2] == before[rank][:2] and after[2] != before[rank][2]
        assert [line["step"] for line in lines(folder, rank)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in read_step_lines(folder.trained_file(0))] == [1, 2, 3, 4, 5, 6]
    Timeline(
        folder, 0, world_size=1, start_step=3
    ).close()  # rank 1 is gone: none of its later steps stay
    assert [[line["step"] for line in lines(folder, rank)] for rank in range(2)] == [
        [1, 2, 3],
        [1, 2, 3],
    ]
    make_run(tmp_path, num_steps=1)
    assert [line["step"] for line in lines(folder)] == [1]


def test_broken_lines_and_failures_to_write_are_raised(tmp_path):
    made = StepLines(tmp_path / "a" / "b.jsonl")
    (tmp_path / "a").rmdir()
    made.append(1, dict)
    with pytest.raises(FileNotFoundError):
        made.close()
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, oops}\n{"step": 3')
    assert list(read_step_lines(path, lambda step: step == 1)) == [{"step": 1}]
    with pytest.raises(ValueError, match=r"x\.jsonl:2: not a JSON line"):
        list(read_step_lines(path))
    path.write_text("hello\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:1: not a line of a step"):
        list(read_step_lines(path))


# ---- samples as the update saw them
# ----------------------------------------------------------------------------------


def trained(
    tmp_path, batches, num_groups: int = 1, logprobs: torch.Tensor | None = None
) -> list[dict]:
    with closing(
        TrainedLog(RunFolder(tmp_path), 0, 1, num_groups, lambda ids: [f"<{i}>" for i in ids])
    ) as log:
        for step, batch in enumerate(batches, start=1):
            log.write(step, batch, batch.old_logprobs if logprobs is None else logprobs)
    return list(read_step_lines(RunFolder(tmp_path).trained_file(0)))


def test_advantages_of_all_and_tokens_of_the_first_groups(tmp_path):
    batch = made_batch(made_groups(1), difference=0.25)
    batch.advantages[batch.starts[1] + 3] = 1.0  # one that differs by token: its mean is kept
    first, second = trained(tmp_path, [batch, batch])
    assert first["sample_ids"] == list(range(12))
    assert first["advantages"][:4] == [1.5, (1.0 - 0.5 - 0.5) / 3, -1.0, 0.0]
    ids = [[5, 6], [5, 6, 9]]
    tokens = [
        {"sample_id": i, "ids": own, "difference": [0.25] * len(own)} for i, own in enumerate(ids)
    ]
    assert first["tokens"][:2] == tokens and len(first["tokens"]) == 4
    assert first["pieces"] == {"5": "<5>", "6": "<6>", "9": "<9>"} and second["pieces"] == {}


def test_untrained_tokens_have_no_difference_and_the_updates_own_forward_serves_too(tmp_path):
    batch = made_batch(made_groups(1))
    seen = batch.old_logprobs.clone()
    seen[batch.starts[1] : batch.starts[2]] = torch.nan  # no update took that sample
    (line,) = trained(tmp_path, [replace(batch, old_logprobs=None)], logprobs=seen)
    assert [sample["difference"] for sample in line["tokens"][:2]] == [
        [0.002, 0.002],
        [None, None, None],
    ]
    batch.loss_mask[batch.starts[0] + 3] = False  # a tool's token
    batch.loss_mask[batch.starts[2] : batch.starts[3]] = False
    masked = trained(tmp_path, [batch])[-1]
    assert masked["tokens"][0]["difference"] == [None, 0.002] and masked["tokens"][2][
        "difference"
    ] == [None, None]
    assert masked["advantages"][2] is None
