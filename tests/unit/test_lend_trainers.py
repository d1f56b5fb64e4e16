"""rollout.lend_trainers without SGLang: what is refused, where engines run, who sleeps, when
trainers lend."""

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.report import explain
from megagrpo.cluster import nodes
from megagrpo.cluster.submit import Request, completed, misfits
from megagrpo.config.load import load_config
from megagrpo.config.placement import Gpu, Nodes, place, placement_problems
from megagrpo.rollout.admission import Turnstile
from megagrpo.rollout.service.engine_command import ServerPlace, engine_command
from megagrpo.types import EngineInfo
from megagrpo.weights.engines.fleet import EngineSubset
from megagrpo.weights.exchange import EngineRefresh
from tests.experiments import QUICKSTART

LENT = ["weights.transport=reshard", "rollout.lend_trainers=1"]
# two nodes of four trainers, an engine of four ranks on each and one on a node of its own
CLUSTER = [
    "actor.world_size=8",
    "actor.parallel={tp: 1, pp: 1, ep: 1}",
    "actor.device=cuda",
    "rollout.tp=4",
]
CLUSTER += [
    "weights.transport=reshard",
    "rollout.lend_trainers=2",
    "rollout.host=eth0",
    "cluster.gpus_per_node=4",
]


def test_lent_engines_are_those_after_the_others():
    config = load_config(QUICKSTART, [*LENT, "rollout.num_engines=2", "rollout.lend_trainers=3"])
    beside = config.rollout.is_beside_trainers
    assert [beside(f"engine-{n}") for n in range(6)] == [False, False, True, True, True, False], (
        "5 was added later"
    )
    config = load_config(
        QUICKSTART, [*LENT, "rollout.mem_fraction=0.8", "rollout.lent_mem_fraction=0.3"]
    )

    def words(engine: str) -> list[str]:
        return engine_command(
            config, ServerPlace(0, "127.0.0.1", 1, "", cuda=True, num_cores=1, engine=engine)
        )

    for engine, fraction, saver in (("engine-0", "0.8", False), ("engine-1", "0.3", True)):
        command = words(engine)
        assert command[command.index("--mem-fraction-static") + 1] == fraction
        assert ("--enable-memory-saver" in command) == saver


def test_lent_engines_are_on_the_trainers_nodes_and_others_on_their_own():
    config = load_config(QUICKSTART, CLUSTER)
    found = place(config)
    assert (found.trainer_nodes, found.rollout_nodes) == (2, 1)
    assert found.engines[0] == tuple(Gpu(2, n) for n in range(4))
    assert found.engines[1:] == (found.trainers[:4], found.trainers[4:])
    request = completed(config, Request(None, gpus_per_node=4))
    assert (request.kind, request.trainer_nodes, request.rollout_nodes) == ("colocated", 2, 1)
    assert misfits(config, request) == []
    assert "lend_trainers wants colocated" in misfits(config, Request("one-job", 2, 1, 4))[0]


@pytest.mark.parametrize(
    ("more", "wanted", "named"),
    [
        (["rollout.lend_trainers=3"], Nodes(4), "12 engine ranks .* lower rollout.lend_trainers"),
        (
            ["rollout.lend_trainers=1", "actor.world_size=4"],
            Nodes(12, 1, 0),
            "need nodes of their own",
        ),
        (["rollout.tp=8", "rollout.lend_trainers=1"], Nodes(4), "raise rollout.nodes_per_engine"),
    ],
)
def test_what_has_no_place(more, wanted, named):
    (problem, *_) = placement_problems(load_config(QUICKSTART, [*CLUSTER, *more]), wanted)
    assert re.search(named, problem), problem


def test_ray_knows_which_nodes_have_trainers(monkeypatch, tmp_path):
    config = load_config(QUICKSTART, CLUSTER)
    monkeypatch.setattr(nodes, "visible_gpus", lambda: ["0", "1", "2", "3"])
    kinds = []
    for rank in range(3):
        words = nodes._ray_command(
            config, nodes.Node(rank, 3, "10.0.0.9", "10.0.0.1", 30000), tmp_path
        )
        kinds += json.loads(words[words.index("--resources") + 1])
    assert kinds == ["beside_trainers", "beside_trainers", "apart_from_trainers"]


def test_engines_that_sleep_are_not_brought_up_to_date():
    def info(number: int, state: str, version: int | None) -> EngineInfo:
        return EngineInfo(f"engine-{number}", "", state, version, 1, 0, 1, "")

    found = [
        info(0, "ready", 3),
        info(1, "asleep", None),
        info(2, "stale", None),
        info(3, "ready", 2),
    ]
    refresh = EngineRefresh.__new__(EngineRefresh)
    assert refresh.due(found, 3) and refresh._due == ["engine-2", "engine-3"]
    assert not refresh.due(found[:2], 3)
    calls = dict.fromkeys(("begin_update", "wake", "mark_ready", "report_lost"))
    registry = SimpleNamespace(api_key="key", engines=lambda: found, **calls)
    assert EngineSubset(registry, lambda engine: engine == "engine-1").engines() == [found[1]]


def test_the_next_request_is_known_until_it_leaves():
    async def order_of_the_next() -> list[tuple[float, ...] | None]:
        turnstile, seen = Turnstile(limit=1), []
        seen.append(turnstile.next_order)

        async def request(order: tuple[float, ...], end: asyncio.Event) -> None:
            async with turnstile.passing(order):
                await end.wait()

        ends = [asyncio.Event() for _ in range(3)]
        tasks = [
            asyncio.create_task(request((0.0, float(n)), end))
            for n, end in zip((0, 2, 1), ends, strict=True)
        ]
        for end in (ends[0], ends[2], ends[1]):
            await asyncio.sleep(0.01)
            seen.append(turnstile.next_order)
            end.set()
        await asyncio.gather(*tasks)
        return seen

    found = asyncio.run(order_of_the_next())
    assert [order and order[:2] for order in found] == [None, (0.0, 1.0), (0.0, 2.0), None]


def test_check_says_what_is_on_a_lent_gpu(tmp_path: Path):
    make_tiny_model(TinyModelConfig(path=str(tmp_path / "model"), family="qwen3_moe"), seed=0)
    text = explain(load_config(QUICKSTART, [*LENT, f"model.path={tmp_path / 'model'}"]))
    assert (
        "lent       1 more on the trainers' GPUs" in text
        and "for trainers, shared by engines" in text
    )
    lines = {line.split()[0]: line for line in text.partition("  colocated")[2].splitlines()[1:5]}
    assert {phase for phase, line in lines.items() if "engine's cache" in line} == {"rollout"}
    assert {phase for phase, line in lines.items() if "optimiser" not in line} == {"rollout"}
