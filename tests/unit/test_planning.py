"""What `megagrpo plan-weights` adds up: the transports' own plans, over the links of a pretended
cluster."""

import json
import re

import numpy as np
import pytest
import torch

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.hardware import HARDWARE, Rates
from megagrpo.cli import main
from megagrpo.config.schema import ActorConfig, ExperimentConfig, ModelConfig
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.plan.forecast import Cluster, broadcast_forecast, cluster_of, reshard_forecast
from megagrpo.tools.plan.publish_bytes import plan_weights
from megagrpo.tools.plan.recordings import Recordings, record_all, representative_ranks
from megagrpo.tools.plan.weights_command import rates_of
from megagrpo.weights.transports.gather_plan import make_gather_plan
from megagrpo.weights.transports.reshard_plan import Cover, make_cover, plan_transfer, trainer_atoms
from megagrpo.weights.wire.messages import Batches
from tests import experiments
from tests.unit.test_weights_reshard_plan import SPECS, engine, trainers

PLAIN = Rates(between_gb_s=1, inside_gb_s=10, efficiency=0.5, message_us=0, call_ms=0)


def placed(
    world: int, engines: int, tp: int, across: int, gpus: int, *, shared: bool = False
) -> Cluster:
    rollout = {"tp": tp, "nodes_per_engine": across, "host": "eth0", "colocate": shared}
    weights = {"transport": "ipc" if shared else "reshard"}
    return cluster_of(
        experiments.experiment(actor={"world_size": world}, rollout=rollout, weights=weights),
        engines,
        gpus,
    )


def cover_of(
    tp: int, ep: int, replicas: int, engine_tp: int, engine_ep: int, piece_bytes: int = 100
) -> Cover:
    atoms = trainer_atoms(trainers(tp, ep, replicas), SPECS)
    return make_cover(atoms, engine(engine_tp, engine_ep), SPECS, piece_bytes)


def staged(batches: Batches, cast: bool) -> int:
    """Bytes that send_batches and receive_batches hold at most: what they pack of two batches in a
    row."""
    packed = [
        [m for m in batch if cast or len(m.slices) > 1 or not m.slices[0].contiguous]
        for batch in batches
    ]
    sizes = [
        sum(part.numel for message in batch for part in message.slices) * 4 for batch in packed
    ]
    return max((a + b for a, b in zip([0, *sizes], [*sizes, 0], strict=True)), default=0)


@pytest.mark.parametrize(
    "alone", [1 << 20, 40]
)  # bytes from which on a piece is a message of its own
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(
    ("engines", "sizes"), [(1, (1, 1, 1, 1, 1)), (2, (2, 2, 2, 2, 2)), (3, (1, 2, 2, 4, 2))]
)
def test_reshard_is_what_the_ranks_would_send(monkeypatch, engines, sizes, cast, alone):
    monkeypatch.setattr("megagrpo.weights.transports.reshard_plan._UNPACKED_BYTES", alone)
    cover, tp, bucket = cover_of(*sizes), sizes[3], 400
    world = sizes[0] * sizes[1] * sizes[2]
    forecast = reshard_forecast(
        cover, placed(world, engines, tp, 1, 8), bucket, PLAIN, torch.float32 if cast else None
    )
    plans = [plan_transfer(cover, slot, engines, bucket) for slot in range(engines)]
    sent = [[list(plan.sent_by(rank).values()) for plan in plans] for rank in range(world)]
    messages = [m for ends in sent for batches in ends for batch in batches for m in batch]
    assert forecast.messages == len(messages)
    assert forecast.wire_bytes == sum(place.numel for m in messages for place in m.slices) * 4
    assert forecast.wire_bytes == forecast.needed_bytes == int(forecast.node_bytes.sum())
    assert forecast.trainer_staging_bytes == max(
        sum(staged(batches, cast) for batches in ends) for ends in sent
    )
    received = [list(plan.received_by(rank).values()) for plan in plans for rank in range(tp)]
    assert forecast.engine_staging_bytes == max(staged(batches, False) for batches in received)
    loads = [
        sum(p.numel * 4 for b in ends for batch in b for m in batch for p in m.slices)
        for ends in sent
    ]
    assert forecast.busiest_sender == (f"trainer {np.argmax(loads)}", max(loads))


def test_the_fullest_link_takes_the_time():
    cover = cover_of(1, 1, 1, 2, 1)
    one_node = reshard_forecast(cover, placed(1, 1, 2, 1, 8), 400, PLAIN)
    two_nodes = reshard_forecast(cover, placed(1, 1, 2, 1, 2), 400, PLAIN)
    assert one_node.between_bytes == 0 and two_nodes.between_bytes == two_nodes.wire_bytes
    assert one_node.limit == two_nodes.limit == "sending from trainer 0"
    assert one_node.seconds == pytest.approx(cover.total_bytes / 5e9)  # half of 10 GB/s
    assert two_nodes.seconds == pytest.approx(cover.total_bytes / 0.5e9)
    slow_calls = Rates(between_gb_s=1, inside_gb_s=10, efficiency=0.5, message_us=2e6, call_ms=3e3)
    seconds = reshard_forecast(cover, placed(1, 1, 2, 1, 8), 400, slow_calls).seconds
    assert seconds == pytest.approx(3 + 2 * one_node.messages, rel=1e-6)


@pytest.mark.parametrize("engines", [1, 3])
def test_broadcast_sends_everything_to_every_rank(engines):
    everyone, tp = trainers(2, 2, 1), 2
    plan = make_gather_plan(everyone, SPECS, 300)
    model = sum(int(np.prod(shape)) for shape, _ in SPECS.values()) * 4
    copied = [
        (rank, c.box.numel * 4)
        for b in plan.buckets
        for rank, copies in b.parts.items()
        for c in copies
    ]
    foreign = sum(size for rank, size in copied if rank)
    least = reshard_forecast(cover_of(2, 2, 1, tp, 1), placed(4, engines, tp, 1, 2), 400, PLAIN)
    forecast = broadcast_forecast(plan, placed(4, engines, tp, 1, 2), least, PLAIN)
    assert forecast.wire_bytes == foreign + engines * tp * model
    assert forecast.busiest_sender == ("trainer 0", engines * model)
    # nodes 0 and 1 have two trainers each, every other one an engine, of which one rank gets the
    # model from outside
    from_outside = sum(size for rank, size in copied if rank in (2, 3))
    assert forecast.between_bytes == from_outside + engines * model
    assert forecast.limit == "sending from trainer 0" and forecast.seconds > engines * model / 0.5e9


def test_ranks_fill_nodes():
    assert placed(2, 2, 2, 1, 8).num_nodes == 1
    apart = placed(12, 3, 4, 1, 8)
    assert apart.trainers.tolist() == [0] * 6 + [1] * 6, "equally many on every node"
    assert apart.engines.tolist() == [[2] * 4, [2] * 4, [3] * 4]
    assert placed(8, 2, 16, 2, 8).engines.tolist() == [[1] * 8 + [2] * 8, [3] * 8 + [4] * 8]
    with pytest.raises(ValueError, match="an engine has 16 ranks a node, but a node 8 GPUs: raise"):
        placed(8, 1, 16, 1, 8)


@pytest.mark.parametrize(
    ("world", "engines", "tp", "across", "nodes", "carriers"),
    [
        (8, 2, 4, 1, [[0] * 4, [1] * 4], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, 4, 2, 1, [[0] * 2, [0] * 2, [1] * 2, [1] * 2], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (8, 1, 8, 2, [[0] * 4 + [1] * 4], [[*range(8)]]),
        (8, 2, 4, 2, [[0, 0, 1, 1]] * 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (4, 1, 2, 1, [[0, 0]], [[0, 1]]),
    ],
)
def test_colocated_engines_are_where_trainers_are(world, engines, tp, across, nodes, carriers):
    cluster = placed(world, engines, tp, across, 4, shared=True)
    assert cluster.engines.tolist() == nodes and cluster.carriers.tolist() == carriers


def test_what_is_on_the_node_stays_there():
    """ipc: what the carriers hold needs no link; between nodes go the elements that no trainer of
    the node holds."""
    atoms = trainer_atoms(trainers(2, 2, 1), SPECS)  # 4 ranks, 2 a node
    cover = make_cover(atoms, engine(2, 1), SPECS, 100)
    for engines in (1, 2):
        cluster = placed(4, engines, 2, 1, 2, shared=True)
        forecast = reshard_forecast(cover, cluster, 400, PLAIN)
        far = own = 0
        for node, carriers in zip(cluster.engines, cluster.carriers, strict=True):
            here = set(np.flatnonzero(cluster.trainers == node[0]).tolist())
            for held, target, size in zip(
                cover.holders, cover.targets, cover.num_bytes, strict=True
            ):
                ranks = cover.ranks[held]
                own += int(size) * (int(carriers[target]) in ranks)
                far += int(size) * (not here & set(ranks))
        assert far > 0 < own and forecast.transport == "ipc"
        assert forecast.between_bytes == far and forecast.wire_bytes == forecast.needed_bytes - own


def test_rates_are_the_tables_unless_told():
    assert rates_of("H100", {"efficiency": None, "call_ms": None}) == HARDWARE["H100"].rates
    assert rates_of("B200", {"between_gb_s": 100.0}).between_gb_s == 100
    with pytest.raises(ValueError, match="--hardware A1 is not in the table, which has H100"):
        rates_of("A1", {})
    with pytest.raises(ValueError, match="--inside-gb-s 0 must be positive"):
        rates_of("H100", {"inside_gb_s": 0.0})


def experiment() -> ExperimentConfig:
    actor = {"world_size": 4, "parallel": {"tp": 2, "ep": 2}}
    return experiments.experiment(
        actor=actor, weights={"bucket_mb": 0.001}, rollout={"tp": 2, "host": "eth0"}
    )


def test_the_plan_as_text_and_as_json(monkeypatch, tmp_path):
    recorded = Recordings(trainers(2, 2, 1), distinct=4, engine=engine(2, 2), specs=SPECS)
    monkeypatch.setattr("megagrpo.tools.plan.publish_bytes.record_all", lambda configs: [recorded])
    text = plan_weights(experiment(), [1, 2], PLAIN, gpus_per_node=4, output=tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())["forecasts"]
    rows = [(engines, transport) for engines in (1, 2) for transport in ("reshard", "broadcast")]
    assert [(f["engines"], f["transport"]) for f in found] == rows
    for forecast in found:
        assert (
            sum(map(sum, forecast["node_bytes"]))
            == forecast["wire_bytes"]
            >= forecast["needed_bytes"]
        )
    assert found[2]["wire_bytes"] == found[2]["needed_bytes"] == 2 * found[0]["wire_bytes"]
    lines = text.splitlines()
    assert lines[1].startswith(
        "trainers   4 ranks on 1 nodes (tp 2 pp 1 vpp 1 cp 1 ep 2 etp 1); 4 hold different"
    )
    assert "1 GB/s a rank between nodes, 10 inside one, of which 50% are reached" in text
    assert "reshard to 2 engines, from node to node: 1 of 1 pairs" in text


def test_a_model_without_a_description_and_one_that_does_not_fit(tmp_path):
    config = experiment().model_copy(update={"model": ModelConfig(path=str(tmp_path))})
    with pytest.raises(
        ValueError, match=r"holds no config.json; no other file of the model is needed"
    ):
        record_all([config])
    description = hf_config(TinyModelConfig(path=str(tmp_path), family="qwen3_moe"))
    (tmp_path / "config.json").write_text(json.dumps(description | {"num_experts": 3}))
    with pytest.raises(
        ValueError, match=r"actor.parallel.ep = 2 does not divide the model's num_experts = 3"
    ):
        record_all([config])


def test_numbers_of_engines_that_are_none_are_called_so(capsys):
    with pytest.raises(SystemExit):
        main(["plan-weights", "unread.yaml", "--engines", "8,a"])
    assert "argument --engines: invalid numbers value: '8,a'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "x", "--search", "0"],
        ["plan-weights", "x", "--engines", "8,0"],
        ["try", "x", "--prompts", "-1"],
        ["bisect", "x", "--max-new-tokens", "0"],
    ],
)
def test_numbers_below_one_are_refused(capsys, words):
    with pytest.raises(SystemExit):
        main(words)
    assert re.search(
        rf"argument {words[2]}: invalid (positive|numbers) value: '{words[3]}'",
        capsys.readouterr().err,
    )


def test_one_rank_stands_for_its_replicas():
    for parallel, expected in (
        ({}, [0, 0, 0, 0]),
        ({"tp": 2, "cp": 2}, [0, 1, 0, 1]),
        ({"tp": 2, "pp": 2}, [0, 1, 0, 1, 4, 5, 4, 5]),
        ({"tp": 2, "ep": 4}, [0, 1, 2, 3, 0, 1, 2, 3]),
        ({"tp": 2, "ep": 2, "etp": 2}, [0, 1, 2, 3, 0, 1, 2, 3]),
    ):
        actor = ActorConfig.model_validate({"world_size": len(expected), "parallel": parallel})
        assert representative_ranks(actor) == expected
