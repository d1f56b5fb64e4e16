"""What `megagrpo plan` computes: small cases by hand, and every shipped cluster experiment."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megagrpo.check.problems import described_architecture
from megagrpo.check.rules.engine_layout import server_of
from megagrpo.check.rules.subject import Nodes
from megagrpo.cli import main
from megagrpo.config.actor import ActorConfig
from megagrpo.config.hardware import HARDWARE
from megagrpo.config.load import load_config
from megagrpo.config.rollout import RolloutConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.config_json import Rotary
from megagrpo.models.folder import Model
from megagrpo.models.kinds.latent.describe import LatentAttention
from megagrpo.models.table import parameter_counts, tensor_groups
from megagrpo.system.run_folder import RunFolder, write_json_lines
from megagrpo.tools.plan import search
from megagrpo.tools.plan.command import PUBLISHED, placed_plan, report
from megagrpo.tools.plan.engine_memory import (
    EngineSide,
    Lengths,
    assumed_lengths,
    engine_side,
    expert_bytes,
    host_peak,
    lengths_of_run,
    weight_bytes,
    weight_elements,
)
from megagrpo.tools.plan.fitting import experiment_memory, with_model
from megagrpo.tools.plan.hardware import CONTEXT_BYTES, hardware_of
from megagrpo.tools.plan.roofline import (
    Target,
    given_lengths,
    plan_step,
    publish_seconds,
    rollout_seconds,
    target_of,
    train_seconds,
)
from megagrpo.tools.plan.search import best_layouts, changes
from megagrpo.tools.plan.trainer_memory import Load, links, stage_parameters, trainer_side
from megagrpo.tools.plan.work import model_work
from tests.experiments import placement_problems

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


def qwen(lengths: Lengths) -> Target:
    return Target(Model.read(QWEN).arch, H100, 8, lengths)


def test_lengths_as_they_are_given(tmp_path):
    config = shipped()
    (tmp_path / "lengths.txt").write_text("30\n10\n20\n")
    found = given_lengths(str(tmp_path / "lengths.txt"), config)
    assert found.responses.tolist() == [10, 20, 30] and found.mean == 20
    # of what runs at a moment: 512 + (100 + 400 + 900) / 3 / (2 * 20)
    assert found.running == pytest.approx(512 + 1400 / 3 / 40)
    assert found.spread(3).tolist() == pytest.approx([13.333, 20, 26.667], rel=1e-3)
    assert given_lengths("800", config).mean == pytest.approx(800, rel=1e-3)
    assumed = assumed_lengths(config).responses
    assert np.quantile(assumed, 0.5) == pytest.approx(0.3 * 8192, rel=2e-3) and assumed.max() == 8192
    assert np.mean(assumed >= 8191) == pytest.approx(0.01, abs=1e-3)
    for text in ("no_such_file", "1/2", "9000", "0", "-3"):
        with pytest.raises(ValueError, match=f"--lengths {text}: no such file, and no mean between 0 and"):
            given_lengths(text, config)
    for word in ("nan", "inf", "tokens"):
        (tmp_path / "lengths.txt").write_text(f"30\n{word}\n")
        with pytest.raises(ValueError, match="lengths.txt: "):
            given_lengths(str(tmp_path / "lengths.txt"), config)


def test_lengths_of_an_earlier_run(tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    groups = ([{"num_tokens": 5}, {"num_tokens": 7}], [{"num_tokens": 3}])
    records = [{"group_id": number, "samples": samples} for number, samples in enumerate(groups)]
    write_json_lines(folder / "step_000001.replica_0.jsonl", records)
    assert lengths_of_run(RunFolder(tmp_path), shipped()).responses.tolist() == [3, 5, 7]
    for step in range(2, 22):  # of a long run only the last ones are read
        write_json_lines(folder / f"step_{step:06d}.replica_0.jsonl", records[1:])
    assert lengths_of_run(RunFolder(tmp_path), shipped()).responses.tolist() == [3] * 20
    with pytest.raises(ValueError, match=r"elsewhere/rollouts: no positive numbers"):
        lengths_of_run(RunFolder(tmp_path / "elsewhere"), shipped())


def test_a_cache_repeats_heads_and_latents():
    work = model_work(Model.read(QWEN).arch)
    assert work.cache_bytes(1) == 188 * 1024  # 94 layers, 4 heads, 128 values of key and value, bf16
    assert work.cache_bytes(4) == work.cache_bytes(8) == work.cache_bytes(64) == 47 * 1024
    attention = LatentAttention(64, None, 512, nope_dim=128, rope_dim=64, v_dim=128, rotary=Rotary(1e4))
    latent = replace(work, arch=replace(work.arch, attention=attention))
    assert latent.cache_bytes(1) == latent.cache_bytes(8) == 94 * 576 * 2
    assert latent.arch.attention.decode_pair_flops == 2 * 64 * (576 + 512)


def test_what_an_engine_rank_holds():
    arch = Model.read(QWEN).arch
    work = model_work(arch)
    one = server_of(RolloutConfig(dtype="bfloat16"))
    assert weight_elements(work, one) == pytest.approx(parameter_counts(arch).total, rel=1e-6)
    # recorded once from SGLang's own loader, over 8 ranks
    eight = server_of(RolloutConfig(tp=8, dtype="bfloat16"))
    assert 2 * weight_elements(work, eight) == pytest.approx(58.9e9, rel=0.005)
    eight_heads = replace(work, arch=replace(arch, attention=replace(arch.attention, kv_heads=8)))
    assert expert_bytes(work, replace(eight, width=4)) == 4 * work.expert / 8
    repeated = weight_elements(work, eight) - weight_elements(eight_heads, eight)
    assert repeated == pytest.approx(94 * 2 * 4096 * 128 * 4 / 8)  # 4 heads of key and of value on 8 ranks


@pytest.mark.parametrize("name", ["Qwen3-235B-A22B", "GLM-4.5", "DeepSeek-V3-0324", "Qwen3-8B"])
def test_fp8_engines_hold_a_byte_an_element_and_a_scale_a_block(name):
    """By the tensors in FP8, without the first halves of latent projections: 0.1 % of DeepSeek-V3."""
    arch = Model.read(MODELS / name).arch
    work, server = model_work(arch), server_of(RolloutConfig(quantization="fp8", dtype="bfloat16"))
    groups = tensor_groups(arch, None).items()
    tensors = sum(number * spec.size * (1 + 4 / 128**2 if spec.in_fp8 else 2) for spec, number in groups)
    assert weight_bytes(work, server) == pytest.approx(tensors, rel=3e-3)
    assert weight_bytes(work, replace(server, fp8=False)) == pytest.approx(2 * parameter_counts(arch).total, rel=1e-6)
    eight = replace(server, tp=8, attention_tp=8)
    assert expert_bytes(work, eight) == pytest.approx(work.expert * (1 + 4 / 128**2) / 8)


def engine(config: ExperimentConfig, lengths: Lengths) -> EngineSide:
    return engine_side(qwen(lengths).work, server_of(config.rollout), lengths, 10240, H100)


def test_the_cache_is_what_weights_leave():
    config, lengths = shipped(), lengths_of(1000, 3000, prompt=500)
    found = engine(config, lengths)
    free = H100.memory_bytes - CONTEXT_BYTES
    assert found.cache_tokens == int((free * 0.85 - found.weights) / (47 * 1024))
    assert found.concurrent == int(found.cache_tokens / (500 + 5e6 / 4000)) and not found.problems
    assert engine(shipped(LARGE, "rollout.max_running_requests=3"), lengths).concurrent == 3
    (problem,) = engine(shipped(LARGE, "rollout.tp=4", "rollout.ep=4"), lengths).problems
    assert "rank's weights are 117.6 GB, but rollout.mem_fraction 0.85 leaves 71.4 GB" in problem
    (problem,) = engine(shipped(LARGE, "rollout.sglang.max_total_tokens=9000"), lengths).problems
    assert problem == "an engine's cache holds 9,000 tokens, but a sample may have 10,240"


def test_a_rollout_reads_weights_and_cache_once_a_step():
    lengths = lengths_of(640)
    config, target = (shipped(LARGE, "train.num_prompts_per_step=512", "train.group_size=16"), qwen(lengths))
    side = engine(config, lengths)
    samples = 512 * 16 / config.rollout.num_engines
    found, slots = rollout_seconds(config, target, side), side.concurrent
    assert slots == 256 < samples
    steps, embedding = 640 * samples / slots, 2 * 151936 * 4096 / 8
    assert found["weights"] == pytest.approx(steps * (side.weights - embedding) / 3.35e12, rel=1e-6)
    assert found["cache"] == pytest.approx(steps * slots * 320 * 47 * 1024 / 3.35e12)
    moved = 2 * 7 / 8 * 4096 * 2 * 188  # two all-reduces of each of 94 layers, a token
    assert found["communication"] == pytest.approx(samples * 640 * moved / 450e9)
    assert found["prefill"] == 0.0


def test_the_long_tail_and_few_slots_take_longer():
    even, config = lengths_of(2000), shipped()
    long = lengths_of(1000, 1000, 1000, 5000)  # as many tokens
    at = [sum(rollout_seconds(config, qwen(found), engine(config, found)).values()) for found in (even, long)]
    assert at[1] > 1.5 * at[0]
    few = shipped(LARGE, "rollout.max_running_requests=4")
    assert sum(rollout_seconds(few, qwen(even), engine(few, even)).values()) > 2 * at[0]
    one = rollout_seconds(config, qwen(even), replace(engine(config, even), concurrent=1))
    all_experts = rollout_seconds(config, qwen(even), replace(engine(config, even), concurrent=200))
    samples = config.train.num_prompts_per_step * config.train.group_size / config.rollout.num_engines
    assert one["weights"] / samples < all_experts["weights"] * 200 / samples / 5  # a step reads 8 of 128 experts


def trained(*words: str, **parallel: int):
    words += ("actor.world_size=64", "train.num_prompts_per_step=256", "train.group_size=4")
    layout = " ".join(f"{key}: {value}," for key, value in {"tp": 4, **parallel}.items())
    config = shipped(LARGE, *words, f"actor.parallel={{{layout}}}", "actor.recompute=full")
    target = qwen(lengths_of(9000))
    side = trainer_side(target.arch, config.actor, Load(max(config.actor.micro_batch_tokens, 9000)))
    return (*train_seconds(config, target, side.stages), side, config)


def test_an_update_is_its_micro_batches_and_the_bubble():
    forward, parts, side, config = trained("actor.micro_batch_tokens=18000", "train.num_updates_per_step=2", pp=2, ep=8)
    dp, peak = config.actor.dp, 989e12
    assert dp == 8
    count = 256 * 4 / 2 / 8 / 2  # samples of an update on a rank, two in a micro-batch
    products = [(each.cost.flops + each.cost.pair_flops * 2 * 9000**2 / 2) / peak for each in side.stages]
    assert {each.load.tokens for each in side.stages} == {18000}
    slowest = int(np.argmax(products))
    assert parts["compute"] == pytest.approx(2 * count * 4 * products[slowest])  # forward, again, 2 backward
    sent = sum(seconds for name, seconds in parts.items() if "communication" in name) / (2 * count * 3)
    assert parts["pipeline bubble"] == pytest.approx(2 * (4 * products[slowest] + 3 * sent))
    assert forward == pytest.approx(2 * (count + 1) * (products[slowest] + sent), rel=1e-2)
    stage = side.stages[slowest].gradient_bytes
    gradients = 2 * (stage["dp"] * 7 / 8 / 50e9 + stage["edp"] * 3 / 4 / 50e9)
    assert stage["dp"] > 0 and parts["gradients"] == pytest.approx(gradients, rel=0.1)
    assert parts["weights to all"] == pytest.approx(parts["gradients"] / 2)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Qwen2.5-7B", 0.0),
        ("Qwen3-30B-A3B", 0.0),
        ("GLM-4.5-Air", 0.0),
        ("DeepSeek-V3-0324", 0.0),
        ("Qwen3.5-397B-A17B", 0.015),  # the products of gated delta nets inside their chunks
    ],
)
def test_trainers_multiply_with_every_weight(name, more):
    """The FLOPs that the trainers' side counts layer by layer are those of the model's own tensors."""
    arch = Model.read(MODELS / name).arch
    actor = ActorConfig.model_validate({"world_size": 2, "dtype": "bfloat16", "parallel": {"tp": 2}})
    (stage,) = trainer_side(arch, actor, Load(1000)).stages
    work = model_work(arch)
    norms = work.whole * arch.num_layers  # which are no products, nor are biases
    token = work.token_flops
    expected = 1000 * token * (1 + more)
    assert stage.cost.flops * 2 == pytest.approx(expected, rel=0.01 + 2 * norms / token)
    assert stage.cost.pair_flops * 2 == pytest.approx(arch.attention.pair_flops * arch.attention_layers)


def test_all_to_all_is_slow_between_nodes():
    near, far = (trained(pp=2, ep=ep)[1] for ep in (8, 32))
    assert far["ep communication"] > 5 * near["ep communication"]
    assert near["tp communication"] == pytest.approx(far["tp communication"])


def test_a_backward_has_no_gradients_of_frozen_weights():
    _, full, _, _ = trained(pp=2)
    _, tuned, _, _ = trained("actor.lora={targets: [q_proj]}", pp=2)
    assert tuned["compute"] == pytest.approx(full["compute"] * 3 / 4)  # forward, again, 1 backward of 2


def test_a_publish_fills_the_fullest_link():
    config, target = shipped(), qwen(lengths_of(1000))
    side = engine(config, target.lengths)
    assert publish_seconds(config, target, side) == {"receiving on an engine": side.weights / 50e9}
    many = config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_engines": 32})})
    assert publish_seconds(many, target, side) == {"sending from the trainers": side.weights * 256 / 128 / 50e9}


@pytest.mark.parametrize("path", CLUSTER, ids=lambda path: path.stem)
def test_every_cluster_experiment_fits(path):
    config = with_model(load_config(path))
    plan = plan_step(config, target_of(config))
    assert plan.problems == ()
    assert plan.synchronous == pytest.approx(sum(plan.seconds.values())) and 0 < plan.off_policy < plan.synchronous
    assert plan.step == (plan.off_policy if config.rollout.max_staleness else plan.synchronous)


def test_the_plan_as_text_names_the_search_if_it_does_not_fit():
    plan = placed_plan(shipped(), lengths="3000")
    text = "\n".join(report(plan))
    assert not plan.problems and "DOES NOT FIT" not in text
    for words in (
        "an upper bound on speed, no forecast",
        "fullest rank",
        "run concurrently",
        "bubble",
        "limit      rollout: ",
        "took 2.3 to 7.5 times such a bound",
    ):
        assert words in text
    with pytest.raises(ValueError, match="A100 is not in the table, which has H100, H200, H20, B200"):
        hardware_of("A100")
    large = shipped("qwen3_8b_gsm8k", "actor.micro_batch_tokens=200000", "actor.recompute=none")
    text = "\n".join(report(placed_plan(large)))
    assert "trainers do not fit: in update rank" in text and "--search 1 proposes layouts" in text


def test_the_command_prints_plan_and_proposals(capsys):
    words = [str(ROOT / "configs" / "qwen3_8b_gsm8k.yaml"), "--search", "2"]
    assert main(["plan", *words, "--set", "model.path=configs/models/Qwen3-8B"]) == 0
    printed = capsys.readouterr().out
    assert "layouts with the best bound of a step; within 5 % the simplest first:" in printed
    assert re.search(r"^1: --set ", printed, re.MULTILINE)


def test_a_search_proposes_what_fits():
    config = shipped("qwen3_8b_gsm8k")
    target = target_of(config)
    found = best_layouts(config, target, 2)
    assert found and all(not plan.problems for plan in found)
    fastest = min(plan.step for plan in found)
    tied = [plan for plan in found if plan.step <= 1.05 * fastest]
    rest = [plan.step for plan in found if plan not in tied]
    assert found[: len(tied)] == tied and rest == sorted(rest)
    cuts = [search._rated(plan)[1] for plan in tied]
    assert cuts == sorted(cuts)
    best = found[0].config
    assert {plan.config.rollout.colocate for plan in found} == {True, False}, "side by side"
    for plan in found:
        ranks = (plan.config.actor.world_size, plan.config.rollout.num_engines * plan.config.rollout.tp)
        assert ranks == ((16, 16) if plan.config.rollout.colocate else (8, 8))
    made = load_config(ROOT / "configs" / "qwen3_8b_gsm8k.yaml", changes(config, best))
    assert made.actor == best.actor and made.rollout == best.rollout and made.weights == best.weights
    assert all(plan.config.rollout.colocate for plan in best_layouts(config, target, 1)), "one node has no others"


def test_a_search_leaves_room_for_teachers():
    teachers = "teachers={large: {path: configs/models/Qwen3-8B, tp: 8, num_engines: 2}}"
    config = shipped("qwen3_8b_gsm8k", teachers, "algorithm.distillation={}")
    found = best_layouts(config, target_of(config), 4)
    assert {(plan.config.actor.world_size, plan.config.engine_ranks) for plan in found} == {(8, 8 + 16)}


def test_words_of_a_proposal_make_it():
    config = shipped("deepseek_v3_671b", "rollout.sglang={schedule_policy: lpm}")
    apart = {**config.rollout.sglang, "enable_dp_attention": True, "dp_size": 8}
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"sglang": apart})})
    made = load_config(ROOT / "configs" / "deepseek_v3_671b.yaml", changes(config, other))
    assert made.rollout == other.rollout


@pytest.mark.slow
def test_a_search_is_no_worse_than_the_shipped_file():
    config = with_model(load_config(ROOT / "configs" / f"{LARGE}.yaml"))
    target = target_of(config)
    assert best_layouts(config, target, 32)[0].step <= plan_step(config, target).step


def test_adam_on_the_host_is_paid_at_the_hosts_rates():
    """30 B elements on 8 ranks: each reads and writes 40 bytes an element at a share of the node's
    memory, and sends gradients and weights over PCIe."""
    host = (
        "actor.optimizer.distributed=true",
        "actor.optimizer.megatron.optimizer_cpu_offload=true",
        "actor.optimizer.megatron.use_precision_aware_optimizer=true",
    )
    _, on_gpu, side, config = trained("actor.micro_batch_tokens=18000", host[0], pp=2, ep=8)
    _, on_host, _, _ = trained("actor.micro_batch_tokens=18000", *host, pp=2, ep=8)
    stage = max(side.stages, key=lambda each: sum(each.gradient_bytes.values()))
    elements = stage.gradient_bytes["dp"] / 4 / 8 + stage.gradient_bytes["edp"] / 4 / 4
    elements *= config.train.updates_of_step
    assert on_gpu["optimizer"] == pytest.approx(elements * 40 / 3.35e12, rel=0.1)
    expected = elements * (40 * 8 / 400e9 + (4 + 2) / 55e9)
    assert on_host["optimizer"] == pytest.approx(expected, rel=0.1)


def test_float32_is_multiplied_without_tensor_cores():
    assert [round(HARDWARE["H100"].bf16_tflops / HARDWARE["H100"].fp32_tflops)] == [15]
    _, wide, _, _ = trained("actor.dtype=float32", pp=2, ep=8)
    _, narrow, _, _ = trained("actor.dtype=bfloat16", pp=2, ep=8)
    assert wide["compute"] == pytest.approx(narrow["compute"] * 989 / 67)


def test_broadcast_has_two_groups_with_each_engine():
    config = shipped(LARGE, "weights.transport=broadcast", "rollout.num_engines=32")
    assert links(config) == 64
    assert links(shipped(LARGE, "weights.transport=reshard", "rollout.num_engines=32")) == 17, "experts on 2 ranks"
    few = "actor.parallel={tp: 1, ep: 4}", "actor.world_size=4"
    config = shipped(LARGE, "weights.transport=reshard", "rollout.num_engines=8", *few)
    assert links(config) == 8, "one rank holds each expert, for all engines"


def test_proposals_for_nodes_of_six_gpus_have_a_place():
    """Engines of a power of two do not fill such nodes."""
    config = shipped("qwen3_30b_a3b", "rollout.host=0.0.0.0")
    target = target_of(config, None, 6)
    for plan in best_layouts(config, target, 3):
        trainers = plan.config.actor.world_size // 6
        own = None if plan.config.rollout.colocate else 3 - trainers
        assert placement_problems(plan.config, Nodes(6, trainers, own)) == []


def test_the_range_of_published_steps_is_that_of_the_table():
    rows = (ROOT / "bench" / "results" / "plan_published.md").read_text().splitlines()
    cells = [row.split("|")[7:9] for row in rows if row.startswith("| NeMo-RL")]
    times = [float(published) / float(bound) for published, bound in cells]
    assert len(times) == 6 and (round(min(times), 1), round(max(times), 1)) == PUBLISHED


def test_a_publish_in_fp8_holds_a_second_copy():
    """weights/quantized.py: the rank's linear weights in a byte each, maxima and scales of all blocks of the model."""
    config = shipped("qwen3_235b_a22b_fp8")
    arch = described_architecture(config)
    publish = experiment_memory(config, arch).trainers.phases["publish"]
    linear = parameter_counts(arch).total - 2 * arch.vocab_size * arch.hidden_size
    assert publish.parts["copy in FP8"] == pytest.approx(
        max(stage.linear for stage in stage_parameters(arch, config.actor)) + 8 * linear / 128**2, rel=2e-3
    )
    plain = shipped("qwen3_235b_a22b_fp8", "rollout.quantization=null")
    assert "copy in FP8" not in experiment_memory(plain, arch).trainers.phases["publish"].parts


def test_the_state_of_colocated_trainers_is_counted_on_the_host():
    config = shipped("qwen3_30b_a3b_one_node", "actor.optimizer.megatron={}")
    memory = experiment_memory(config, described_architecture(config))
    away = memory.trainers.phases["update"].parts["optimizer"] * 8
    assert memory.trainers.host_bytes["update state"] == pytest.approx(away)


def test_the_host_memory_of_a_node_is_judged():
    config = with_model(shipped("qwen3_30b_a3b_one_node", "actor.optimizer.megatron={}"))
    memory = experiment_memory(config, described_architecture(config))
    parts = memory.trainers.host_bytes
    peak = host_peak(config, memory.trainers, memory.engine, 8)
    assert peak == sum(parts.values()) - min(parts["checkpoint"], parts["resume"]) > parts["update state"] > 0
    cached = shipped("qwen3_30b_a3b_one_node", "rollout.sglang={enable_hierarchical_cache: true, hicache_size: 50}")
    assert host_peak(cached, memory.trainers, memory.engine, 8) == pytest.approx(peak + 8 * 50e9)
    for more in (1, -1):
        said = str(placed_plan(config, host_gb=peak / 1e9 + more).problems)
        assert ("host memory of the fullest node" in said) is (more < 0)


def test_the_references_hidden_states_of_an_exact_kl_are_counted_on_the_host():
    whole = {}
    for estimator in ("k3", "full"):
        config = shipped("qwen3_235b_a22b", "algorithm.kl.loss_coef=0.1", f"algorithm.kl.estimator={estimator}")
        memory = experiment_memory(config, described_architecture(config), 8)
        whole[estimator] = memory.trainers.host_bytes["reference's hidden states"]
    assert whole["k3"] == 0
    p, train = config.actor.parallel, config.train
    samples = train.num_prompts_per_step * train.group_size
    tokens = whole["full"] / (8 * 4096 * 2) * config.actor.dp * p.cp / samples
    assert 0 < tokens <= config.sampling.max_response_tokens
