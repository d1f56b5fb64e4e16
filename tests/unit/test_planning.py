"""Where ranks go on nodes, and numbers on the command line."""

import re

import pytest

from megagrpo.check.rules.placement import Placement, place
from megagrpo.check.rules.subject import Nodes
from megagrpo.cli import main
from tests import experiments


def placed(world: int, engines: int, tp: int, across: int, gpus: int, *, shared: bool = False) -> Placement:
    rollout = {"tp": tp, "nodes_per_engine": across, "host": "eth0", "colocate": shared}
    rollout |= {"num_engines": engines}
    config = experiments.experiment(
        actor={"world_size": world}, rollout=rollout, weights={"transport": "ipc" if shared else "reshard"}
    )
    return place(config, Nodes(gpus))


def nodes(engines) -> list[list[int]]:
    return [[gpu.node for gpu in engine] for engine in engines]


def test_ranks_fill_nodes():
    assert {gpu.node for engine in placed(2, 2, 2, 1, 8).engines for gpu in engine} == {0}
    apart = placed(12, 3, 4, 1, 8)
    assert nodes([apart.trainers]) == [[0] * 6 + [1] * 6], "equally many on every node"
    assert nodes(apart.engines) == [[2] * 4, [2] * 4, [3] * 4]
    assert nodes(placed(8, 2, 16, 2, 8).engines) == [[1] * 8 + [2] * 8, [3] * 8 + [4] * 8]
    with pytest.raises(ValueError, match="an engine has 16 ranks a node, but a node 8 GPUs: raise"):
        placed(8, 1, 16, 1, 8)


@pytest.mark.parametrize(
    ("world", "engines", "tp", "across", "at", "carriers"),
    [
        (8, 2, 4, 1, [[0] * 4, [1] * 4], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, 4, 2, 1, [[0] * 2, [0] * 2, [1] * 2, [1] * 2], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (8, 1, 8, 2, [[0] * 4 + [1] * 4], [[*range(8)]]),
        (8, 2, 4, 2, [[0, 0, 1, 1]] * 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (4, 1, 2, 1, [[0, 0]], [[0, 1]]),
    ],
)
def test_colocated_engines_are_where_trainers_are(world, engines, tp, across, at, carriers):
    found = placed(world, engines, tp, across, 4, shared=True)
    assert nodes(found.engines) == at
    assert [[found.trainers.index(gpu) for gpu in engine] for engine in found.engines] == carriers


@pytest.mark.parametrize(
    "words", [["plan", "x", "--search", "0"], ["try", "x", "--prompts", "-1"], ["bisect", "x", "--max-new-tokens", "0"]]
)
def test_numbers_below_one_are_refused(capsys, words):
    with pytest.raises(SystemExit):
        main(words)
    assert re.search(rf"argument {words[2]}: invalid positive value: '{words[3]}'", capsys.readouterr().err)
