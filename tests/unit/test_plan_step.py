"""What `megagrpo plan` computes: small cases by hand, and every shipped cluster experiment by closed forms."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megagrpo.config.actor import ActorConfig
from megagrpo.config.load import load_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.table import parameter_counts, read_architecture
from megagrpo.planning.engine_memory import EngineSide, engine_side, server_of, weight_elements
from megagrpo.planning.hardware import EFFICIENCY, HARDWARE, efficiency, hardware_of
from megagrpo.planning.lengths import Lengths, assumed_lengths, given_lengths, lengths_of_run
from megagrpo.planning.plan import Options, plan_command, target_of, with_model
from megagrpo.planning.rollout_time import EngineSpeed, rollout_time
from megagrpo.planning.search import best_layouts, changes
from megagrpo.planning.step_time import plan_step, publish_seconds
from megagrpo.planning.train_time import Schedule, TrainSpeed, schedule_of, train_time
from megagrpo.planning.trainer_memory import Load, trainer_side
from megagrpo.planning.work import model_work

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "configs" / "models"
QWEN = MODELS / "Qwen3-235B-A22B"
H100 = HARDWARE["H100"]
CLUSTER = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if load_config(path).actor.world_size >= 16]


LARGE = "qwen3_235b_a22b"
SHORT = ("sampling.max_response_tokens=8192", "rollout.tp=8", "rollout.ep=8", "rollout.nodes_per_engine=1")


def shipped(name: str = LARGE, *words: str) -> ExperimentConfig:
    here = SHORT if name == LARGE else ()
    return with_model(load_config(ROOT / "configs" / f"{name}.yaml", [*here, *words]))


def lengths_of(*responses: float, prompt: float = 0.0) -> Lengths:
    return Lengths(prompt, np.array(sorted(responses)), "test")


def test_every_number_of_the_table_has_a_source():
    for name, row in EFFICIENCY.items():
        assert len(row.source) > 20 and row.value > 0, name
        assert "estimate" in row.source or "(" in row.source, f"{name}: name a document, or call it an estimate"
    for row in HARDWARE.values():
        assert "data sheet" in row.source or "specification" in row.source
    with pytest.raises(ValueError, match="A100 is not in the table, which has H100, H200, H20, B200"):
        hardware_of("A100")


def test_lengths_as_they_are_given(tmp_path):
    config = shipped()
    (tmp_path / "lengths.txt").write_text("30\n10\n20\n")
    found = given_lengths(str(tmp_path / "lengths.txt"), config)
    assert found.responses.tolist() == [10, 20, 30] and found.mean == 20
    # of what runs at a moment: 512 + (100 + 400 + 900) / 3 / (2 * 20)
    assert found.held == pytest.approx(512 + 1400 / 3 / 40)
    assert found.spread(3).tolist() == pytest.approx([13.333, 20, 26.667], rel=1e-3)
    given = given_lengths("3000/2500/7000", config)
    assert given.mean == pytest.approx(3000) and given.percentile(0.5) == pytest.approx(2500, rel=2e-3)
    assert given.percentile(0.99) == pytest.approx(7000, rel=2e-2) and given.responses.max() <= 8192
    assert (np.diff(given.responses) >= 0).all()
    assert given_lengths("4000", config).mean == pytest.approx(4000, rel=1e-6)
    assert assumed_lengths(config).percentile(0.5) == pytest.approx(0.3 * 8192, rel=2e-3)
    for text, message in {
        "no_such_file": "no such file, and not MEAN or MEAN/P50/P99",
        "1/2": "give MEAN or MEAN/P50/P99",
        "9000": "max_response_tokens is 8192",
        "3000/2500/9000": "must ascend",
        "7900/500/8000": "no distribution",
    }.items():
        with pytest.raises(ValueError, match=message):
            given_lengths(text, config)


def test_lengths_of_an_earlier_run(tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    records = [
        {"group_id": 0, "samples": [{"num_tokens": 5}, {"num_tokens": 7}]},
        {"group_id": 1, "samples": [{"num_tokens": 3}]},
    ]
    (folder / "step_000001.replica_0.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert lengths_of_run(tmp_path, shipped()).responses.tolist() == [3, 5, 7]
    with pytest.raises(ValueError, match=r"no samples in rollouts"):
        lengths_of_run(tmp_path / "elsewhere", shipped())


@pytest.mark.parametrize("folder", sorted(MODELS.iterdir()), ids=lambda folder: folder.name)
def test_the_work_is_of_every_parameter(folder):
    arch = read_architecture(folder)
    counts, work = parameter_counts(arch), model_work(arch)
    assert work.total == counts.total
    active = sum(sum(work.forward_flops(layer)) for layer in work.layers) / 2 + work.head + work.hidden
    assert active == pytest.approx(counts.active, rel=1e-9)  # without the embedding, which only looks up


def test_a_cache_repeats_heads_and_latents():
    work = model_work(read_architecture(QWEN))
    assert work.cache_bytes(1) == 188 * 1024  # 94 layers, 4 heads, 128 values of key and value, bf16
    assert work.cache_bytes(4) == work.cache_bytes(8) == work.cache_bytes(64) == 47 * 1024
    latent = replace(work, latent=576, rope_dim=64)
    assert latent.cache_bytes(1) == latent.cache_bytes(8) == 94 * 576 * 2
    assert latent.decode_attention_flops == 2 * 64 * (576 + 512)


def test_what_an_engine_rank_holds():
    work = model_work(read_architecture(QWEN))
    assert weight_elements(work, 1, 1) == pytest.approx(work.total, rel=1e-6)
    # what SGLang's own loader asks for is 58.9 GB on each of 8 ranks: see bench/results/plan_weights_235b.md
    assert 2 * weight_elements(work, 8, 8) == pytest.approx(58.9e9, rel=0.005)
    repeated = weight_elements(work, 8, 8) - weight_elements(replace(work, num_kv_heads=8), 8, 8)
    assert repeated == pytest.approx(94 * 2 * 4096 * 128 * 4 / 8)  # 4 heads of key and of value on 8 ranks


def engine(config: ExperimentConfig, lengths: Lengths) -> EngineSide:
    return engine_side(model_work(read_architecture(QWEN)), server_of(config.rollout), lengths, 10240, H100)


def test_the_cache_is_what_weights_leave():
    config, lengths = shipped(), lengths_of(1000, 3000, prompt=500)
    found = engine(config, lengths)
    free = H100.memory_bytes - efficiency("context bytes")
    assert found.cache_tokens == int((free * 0.85 - found.weights) / (47 * 1024))
    assert found.at_once == int(found.cache_tokens / (500 + 5e6 / 4000)) and not found.problems
    few = engine(shipped(LARGE, "rollout.max_running_requests=3"), lengths)
    assert few.at_once == 3
    (problem,) = engine(shipped(LARGE, "rollout.tp=4", "rollout.ep=4"), lengths).problems
    assert "rank's weights are 117.6 GB, but rollout.mem_fraction 0.85 leaves 71.4 GB" in problem
    (problem,) = engine(shipped(LARGE, "rollout.max_total_tokens=9000"), lengths).problems
    assert problem == "an engine's cache holds 9,000 tokens, but a sample may have 10,240"


def test_a_decode_step_reads_weights_and_cache():
    config, lengths = shipped(), lengths_of(1000)
    side = engine(config, lengths)
    speed = EngineSpeed(model_work(read_architecture(QWEN)), side, H100, 8)
    memory = 3.35e12 * efficiency("memory")
    parts = speed.decode(1000, 1e5)  # so many that every expert is needed
    embedding = 2 * 151936 * 4096 / 8
    assert parts["weights"] == pytest.approx((side.weights - embedding) / memory, rel=1e-6)
    assert parts["cache"] == pytest.approx(1e5 * 47 * 1024 / memory)
    one = speed.decode(1, 0)
    assert one["weights"] < parts["weights"] / 5 and one["compute"] == one["cache"] == 0  # 8 of 128 experts
    moved = 2 * 7 / 8 * 1000 * 4096 * 2 / (450e9 * efficiency("nvlink"))
    assert parts["communication"] == pytest.approx(188 * (moved + efficiency("all-reduce latency us") / 1e6))


def test_samples_of_one_length_take_their_steps():
    config, lengths = shipped(), lengths_of(640)
    side = engine(config, lengths)
    speed = EngineSpeed(model_work(read_architecture(QWEN)), side, H100, 8)
    found = rollout_time(speed, side, lengths, samples=80, engines=8)
    steps = [sum(speed.decode(10, 10 * (start + 16)).values()) * 32 for start in range(0, 640, 32)]
    assert found.seconds - found.parts["prefill"] == pytest.approx(sum(steps), rel=1e-6)
    assert found.at_once == 10 and found.retracted == 0 and found.waited_for == 0
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_a_full_cache_makes_samples_wait():
    config, lengths = shipped(), lengths_of(4000, 4000, 4000, 8000)
    side = engine(config, lengths)
    speed = EngineSpeed(model_work(read_architecture(QWEN)), side, H100, 8)
    free = rollout_time(speed, side, lengths, 256, 8)
    tight = rollout_time(speed, replace(side, cache_tokens=60_000), lengths, 256, 8)
    assert tight.seconds > 1.2 * free.seconds and tight.at_once < 0.8 * free.at_once
    assert tight.retracted > 0 == free.retracted
    assert 0.05 * free.seconds < free.tail_seconds < free.seconds - free.half_done
    waiting = rollout_time(speed, replace(side, server=replace(side.server, running_requests=4)), lengths, 256, 8)
    assert waiting.most_at_once == 4 and waiting.seconds > free.seconds


def test_a_schedule_is_what_the_loop_would_cut():
    arch = read_architecture(QWEN)
    actor = ActorConfig(world_size=2, micro_batch_tokens=100)
    found = schedule_of(np.array([60.0, 60, 40, 40, 100, 100]), arch, actor)
    assert found.count == 2 and found.tokens == 100  # 100 + (60 + 40) on each of two ranks
    assert found.pairs == pytest.approx((3600 + 1600 + 10000) / 2 / 2)
    assert found.slowest == pytest.approx(1.0) and found.waiting == pytest.approx(0.0)
    uneven = schedule_of(np.array([100.0, 50]), arch, actor)
    assert uneven.slowest == pytest.approx(100 / 75, rel=1e-3) and uneven.waiting == pytest.approx(0.25, rel=1e-2)


def trained(**parallel):
    config = shipped()
    values = {"world_size": 64, "dtype": "bfloat16", "micro_batch_tokens": 1000, "parallel": {"tp": 4, **parallel}}
    actor = ActorConfig.model_validate(values | {"recompute": "full"})
    arch = read_architecture(QWEN)
    side = trainer_side(arch, actor, Load(1000, 1000))
    speed = TrainSpeed(model_work(arch), actor, H100, 8)
    schedule = Schedule(count=4, tokens=1000, pairs=5e5, slowest=1.25)
    assert config.actor.parallel.tp == actor.parallel.tp
    return train_time(speed, side.stages, schedule, actor, updates=2, passes=1), side, speed, schedule


def test_an_update_is_its_micro_batches_and_the_bubble():
    found, side, speed, schedule = trained(pp=2, ep=8)
    stages = [speed.stage(cost, schedule) for cost in side.stages]
    both = max(
        stage.compute * 4 + 3 * (stage.forward - stage.compute) for stage in stages
    )  # forward, again, 2 backward
    passes = sum(found.parts[name] for name in ("compute", "layer overhead", "pipeline bubble"))
    passes += sum(seconds for name, seconds in found.parts.items() if "communication" in name or "waiting" in name)
    assert passes == pytest.approx(2 * (4 * 1.25 + 1) * both)
    assert found.parts["pipeline bubble"] == pytest.approx(2 * both)
    assert found.forward == pytest.approx(2 * (4 * 1.25 + 1) * max(stage.forward for stage in stages))
    assert found.update == pytest.approx(sum(found.parts.values())) and found.waiting == pytest.approx(0.2)
    assert 0.2 <= found.bubble < 0.25  # 1 of 5 rounds, and the head on one stage alone


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-30B-A3B", "GLM-4.5-Air", "DeepSeek-V3-0324"])
def test_trainers_multiply_with_every_weight(name):
    """The FLOPs that the trainers' side counts layer by layer are those of the model's own tensors."""
    arch = read_architecture(MODELS / name)
    actor = ActorConfig.model_validate({"world_size": 2, "dtype": "bfloat16", "parallel": {"tp": 2}})
    (stage,) = trainer_side(arch, actor, Load(1000, 1000)).stages
    work = model_work(arch)
    norms = work.whole * len(work.layers)  # which are no products, nor are biases
    token = sum(sum(work.forward_flops(layer)) for layer in work.layers) + 2 * work.head
    assert stage.flops * 2 == pytest.approx(1000 * token, rel=0.01 + 2 * norms / token)
    assert stage.pair_flops * 2 == pytest.approx(work.attention_flops * len(work.layers))


def test_all_to_all_is_slow_between_nodes():
    near, _, _, _ = trained(pp=2, ep=8)
    far, _, _, _ = trained(pp=2, ep=32)
    assert far.parts["ep communication"] > 5 * near.parts["ep communication"]
    assert near.parts["tp communication"] == pytest.approx(far.parts["tp communication"])


def test_a_publish_fills_the_fullest_link():
    config, lengths = shipped(LARGE, "weights.transport=reshard"), lengths_of(1000)
    target = target_of(config, Options())
    side = engine(config, lengths)
    seconds, limit = publish_seconds(config, target, side)
    assert seconds == pytest.approx(side.weights / (50e9 * 0.8) + 0.005) and limit.startswith("receiving on an engine")
    many = config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_engines": 32})})
    seconds, limit = publish_seconds(many, target, side)
    assert seconds == pytest.approx(side.weights * 256 / 128 / 40e9 + 0.005) and limit.startswith(
        "sending from the trainers"
    )


@pytest.mark.parametrize("path", CLUSTER, ids=lambda path: path.stem)
def test_every_cluster_experiment_fits(path):
    config = with_model(load_config(path))
    plan = plan_step(config, target_of(config, Options()))
    assert plan.problems == []
    assert plan.step == pytest.approx(sum(plan.seconds.values())) and 0 < plan.asynchronous < plan.step
    assert 0 < plan.idle < 1 and plan.engine.at_once > 0


def test_the_plan_as_text_and_json(tmp_path):
    text, fits = plan_command(shipped(), Options(quick=True, lengths="3000", json=tmp_path / "plan.json"))
    assert fits and "DOES NOT FIT" not in text
    for words in (
        "fullest rank",
        "samples of these lengths run at once",
        "pipeline bubble",
        "one step off-policy",
        "limit ",
    ):
        assert words in text
    found = json.loads((tmp_path / "plan.json").read_text())["plan"]
    assert found["step"] == pytest.approx(sum(found["seconds"].values())) and found["problems"] == []
    assert all(row["source"] for row in found["efficiency"].values())


def test_what_does_not_fit_comes_with_a_change_that_does():
    large = "actor.micro_batch_tokens=200000"
    text, fits = plan_command(shipped("qwen3_8b_gsm8k", large), Options(quick=True))
    assert not fits and "trainers do not fit: in update rank" in text
    (line,) = [line for line in text.splitlines() if "nearest change that fits" in line]
    words = [word for word in line.split() if "=" in word]
    assert words
    again, fits = plan_command(shipped("qwen3_8b_gsm8k", large, *words), Options(quick=True))
    assert fits, again
    with pytest.raises(ValueError, match="both say how long"):
        plan_command(shipped(), Options(quick=True, lengths="5", lengths_from=Path("x")))


def test_a_search_proposes_what_fits():
    config = shipped("qwen3_8b_gsm8k")
    target = target_of(config, Options())
    found = best_layouts(config, target, 2)
    assert found and all(not plan.problems for plan in found)
    assert [plan.step for plan in found] == sorted(plan.step for plan in found)
    best = found[0].config
    assert best.actor.world_size == best.rollout.num_engines * best.rollout.tp == 8
    made = load_config(ROOT / "configs" / "qwen3_8b_gsm8k.yaml", changes(config, best))
    assert made.actor == best.actor and made.rollout == best.rollout
    with pytest.raises(ValueError, match="nodes of their own"):
        best_layouts(config, target, 1)


@pytest.mark.slow
def test_a_search_is_no_worse_than_the_shipped_file():
    config = with_model(load_config(ROOT / "configs" / f"{LARGE}.yaml"))
    target = target_of(config, Options())
    assert best_layouts(config, target, 32)[0].step <= plan_step(config, target).step
