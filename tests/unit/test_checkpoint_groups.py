"""Groups in a binary file."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from megagrpo.checkpoint.groups import read_groups, write_groups
from megagrpo.checkpoint.resume import waiting_groups
from megagrpo.checkpoint.save import RunIdentity
from megagrpo.mesh import make_mesh
from megagrpo.types import ImageRef, Outcome, Prompt, RolloutGroup, Sample


def test_groups_come_back_as_they_were(tmp_path):
    generator = np.random.default_rng(0)
    ids, images = generator.integers(0, 150_000, 5), (ImageRef("key", 1, (1, 4, 4)),)
    prompt = Prompt(
        7,
        "1+1=",
        ids,
        "2",
        "exact",
        "a.jsonl:3",
        "gsm8k",
        {"level": [1, "x"], "array": [5, 4, 3]},
        images=images,
        messages=[{"role": "user", "content": "1+1="}],
        tools=[{"type": "function", "function": {"name": "add"}}],
    )
    samples = tuple(
        Sample(i, generator.integers(0, 150_000, n), -generator.random(n), "stop", 3, "é", mask)
        for i, (n, mask) in enumerate([(4, None), (0, None), (3, (1, 0, 1))])
    )
    outcomes = (
        Outcome("score", 0.1 + 0.2, parts={"array": Outcome("score", 2.0)}),  # a grader of that name
        Outcome("error", detail="x", parts={"taste": Outcome("timeout", detail="10 s")}),
        Outcome("score", -1.0, token_rewards=((0, 0.5), (2, -1.5))),
    )
    groups = [
        RolloutGroup(0, prompt, samples, outcomes),
        RolloutGroup(1, prompt, samples, outcomes, Sample(0, (1, 2), (0.0, -0.5), "length", 3, ""), Outcome("score")),
    ]
    write_groups(tmp_path / "groups.npz", groups)
    found = read_groups(tmp_path / "groups.npz")
    assert found == groups
    vars(prompt)["question"] = "1+1="  # as older checkpoints have it
    write_groups(tmp_path / "older.npz", groups)
    del vars(prompt)["question"]
    assert read_groups(tmp_path / "older.npz") == groups
    odd = replace(prompt, extra={"value": float("nan"), "\0array": ["int32", 0, 1], "half": "\ud83d"})
    write_groups(tmp_path / "odd.npz", [replace(groups[0], prompt=odd)])
    (back,) = read_groups(tmp_path / "odd.npz")
    assert repr(back.prompt.extra) == repr(odd.extra)
    assert found[0].samples[2].loss_mask.tolist() == [True, False, True]
    arrays = found[1].greedy.token_ids, found[1].greedy.logprobs, found[0].prompt.token_ids
    assert [array.dtype for array in arrays] == [np.int32, np.float32, np.int32]


def test_a_group_does_not_keep_its_file_in_memory(tmp_path):
    """Of 113 MiB that a rank read, 14 were its own; the others stayed as long as these."""
    sample = Sample(0, [5, 6], [-0.5, -0.25], "stop", 3, "text")
    group = RolloutGroup(7, Prompt(0, "text", [1, 2], "4"), (sample,), (Outcome("score", 1.0),))
    write_groups(tmp_path / "groups.npz", [group] * 9)
    kept = read_groups(tmp_path / "groups.npz")[4]
    for array in (kept.prompt.token_ids, kept.samples[0].token_ids, kept.samples[0].logprobs):
        assert array.base is None or array.base.nbytes == array.nbytes


def test_a_group_whose_rewards_overflow_comes_back(tmp_path):
    """An environment's rewards are finite, their sum need not be."""
    rewards = (1e308, 1e308)
    sample = Sample(0, [5, 6], [-0.5, -0.25], "stop", 3, "text")
    outcome = Outcome("score", sum(rewards), end="done", turn_rewards=rewards)
    group = RolloutGroup(7, Prompt(0, "text", [1, 2], "4"), (sample,), (outcome,))
    write_groups(tmp_path / "groups.npz", [group])
    assert read_groups(tmp_path / "groups.npz") == [group]


def test_samples_are_compared_with_their_arrays():
    one = Sample(0, (1, 2), (-0.5, -1.0), "stop", 0, "a")
    assert one == Sample(0, [1, 2], np.array([-0.5, -1.0]), "stop", 0, "a")
    changes = ({"token_ids": (1, 3)}, {"logprobs": (-0.5, -1.5)}, {"loss_mask": (1, 1)})
    for change in (*changes, {"token_ids": (1,), "logprobs": (-0.5,)}):
        assert one != replace(one, **change)


@pytest.mark.parametrize(
    ("layout", "older", "ahead", "surplus"),
    [({"ranks": 2}, False, [1], [1]), ({"ranks": 1}, False, [0, 1], [0, 1]), ({"ranks": 2}, True, [0, 1], [1])],
)
def test_a_leader_reads_its_own_file_if_the_layout_is_that_of_the_save(tmp_path, layout, older, ahead, surplus):
    """All of them, with the experts of each token, fill the memory of a node with several leaders. An older checkpoint
    has one file of all."""
    (tmp_path / "state.json").write_text(json.dumps({"layout": {"ranks": 2}}))
    sample = Sample(0, [5, 6], [-0.5, -0.25], "stop", 3, "text")
    group = RolloutGroup(0, Prompt(0, "text", [1, 2], "4"), (sample,), (Outcome("score", 1.0),))
    groups = [replace(group, group_id=number) for number in (0, 1)]
    for name in ("ahead", "surplus"):
        files = {"": groups} if older else {f"-{number:05}": [groups[number]] for number in (0, 1)}
        for number, of_file in files.items():
            write_groups(tmp_path / f"{name}{number}.npz", of_file)
    ranks = layout["ranks"]
    mesh = replace(make_mesh(0, 1, torch.device("cpu"), 60.0), dp_rank=ranks - 1, dp_size=ranks)
    found = waiting_groups(tmp_path, RunIdentity({}, layout), mesh)
    assert [[group.group_id for group in groups] for groups in found] == [ahead, surplus]
