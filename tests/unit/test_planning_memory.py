"""The trainers' closed forms against recorded bytes of GPU kernels; what saves and resumes cost, by sums by hand."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import described_architecture
from megagrpo.check.rules.table import broken_as_read
from megagrpo.config.load import load_config
from megagrpo.config.schema import ActorConfig, ExperimentConfig, ParallelConfig
from megagrpo.models.table import architecture_of, parameter_counts
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.explain import explain
from megagrpo.tools.plan import search
from megagrpo.tools.plan.checkpoint_cost import checkpoint_cost, checkpoint_lines, disk_advice
from megagrpo.tools.plan.engine_memory import host_peak
from megagrpo.tools.plan.fitting import experiment_memory, load_of, with_model
from megagrpo.tools.plan.hardware import gigabytes
from megagrpo.tools.plan.roofline import target_of
from megagrpo.tools.plan.trainer_memory import Load, in_flight, trainer_stages
from megagrpo.tools.plan.work import optimizer_bytes
from tests.experiments import QUICKSTART, experiment

pytestmark = pytest.mark.verifies(
    "runs", "`plan`: memory against real ranks and recorded bytes; no seconds", "dist/test_memory.py"
)

MODELS = Path(__file__).parents[2] / "configs" / "models"
ALLOWED = {"DeepSeek-V3-0324": 0.16}  # of what an update adds; the others: 0.05, the largest difference is 0.031
# Recorded at commit 110b4be, whose dry run made Megatron's real update on shapes, with what a GPU's kernels keep: by
# rank MB of parameters, gradients and optimizer, and what forward and backward add to them. All models of 4 layers,
# Qwen3-235B of 2; tokens of a micro-batch and of the longest sample, imbalance of experts.
RECORDED = [
    (
        "Qwen2.5-7B", {"world_size": 8, "parallel": {"tp": 2, "pp": 2}, "recompute": "none"}, (8192, 1.0),
        {0: (1011.1, 2022.3, 3033.4, 4454), 4: (1011.1, 2022.3, 3033.4, 4022)},
    ),
    (
        "Qwen3-30B-A3B", {"world_size": 8, "parallel": {"ep": 8}, "recompute": "none"}, (8192, 1.3),
        {0: (2001.8, 4003.5, 4672.2, 8387)},
    ),
    (
        "Qwen3-235B-A22B", {"world_size": 64, "parallel": {"tp": 4, "pp": 2, "ep": 16}, "recompute": "full"},
        (8192, 1.5), {0: (649.9, 1299.7, 1166.9, 1728), 32: (649.9, 1299.8, 1166.9, 1684)},
    ),
    (
        "GLM-4.5-Air", {"world_size": 16, "parallel": {"tp": 2, "ep": 8, "pp": 2}, "recompute": "none"},
        (4096, 1.3), {0: (1545.4, 3090.8, 4809.5, 3236), 8: (1982.9, 3965.9, 7957.2, 3697)},
    ),
    (
        "DeepSeek-V3-0324", {"world_size": 32, "parallel": {"tp": 2, "ep": 16, "pp": 2}, "recompute": "none"},
        (4096, 1.3), {0: (2124.0, 4247.9, 1593.0, 4359), 16: (3184.6, 6369.2, 9787.2, 5644)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "options", "load", "recorded"), RECORDED, ids=lambda value: str(value)[:20])
def test_closed_forms_are_near_the_bytes_of_gpu_kernels(model, options, load, recorded):
    layers = {"num_hidden_layers": 2 if "235B" in model else 4}
    description = json.loads((MODELS / model / "config.json").read_text()) | layers
    actor = ActorConfig.model_validate(options | {"dtype": "bfloat16"})
    stages = trainer_stages(architecture_of(description), actor, Load(*load))
    ranks = [stage.memory("update", bucket_bytes=0.0) for stage in stages]
    assert [rank.rank for rank in ranks] == list(recorded)
    for rank, (*held, added) in zip(ranks, recorded.values(), strict=True):
        names = ("parameters", "gradients", "optimizer")
        assert [rank.parts[name] / 1e6 for name in names] == pytest.approx(held, rel=1e-3)
        found = sum(rank.parts.get(part, 0.0) for part in ("activations", "head"))
        assert found / 1e6 == pytest.approx(added, rel=ALLOWED.get(model, 0.05))


def test_a_draft_behind_the_first_stage_has_a_copy_of_the_embedding():
    arch = architecture_of(json.loads((MODELS / "GLM-4.5-Air" / "config.json").read_text()), True)
    options = {"world_size": 4, "dtype": "bfloat16", "parallel": {"tp": 2, "pp": 2}}

    def copies(**draft: bool) -> list[float]:
        stages = trainer_stages(arch, ActorConfig.model_validate(options | {"draft": draft}), Load(1024))
        return [stage.memory("update", 0.0).parts.get("draft's embedding", 0.0) for stage in stages]

    assert copies(train=True) == [0.0, arch.vocab_size / 2 * arch.hidden_size * 2]
    assert copies(train=False) == [0.0, 0.0]


def test_linear_weights_in_fp8_are_held_twice_beside_those_in_bfloat16():
    arch = architecture_of(json.loads((MODELS / "Qwen2.5-7B" / "config.json").read_text()))
    megatron = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    actor = ActorConfig(dtype="bfloat16", transformer_engine=True, megatron=megatron)
    (stage,) = trainer_stages(arch, actor, Load(1024))
    hidden, inner = arch.hidden_size, arch.ffn_size
    kv = arch.attention.kv_heads * arch.attention.head_dim
    linear = arch.num_layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
    held = {phase: stage.memory(phase, 0.0).parts.get("weights in FP8") for phase in ("load", "rollout", "update")}
    assert held == {"load": None, "rollout": 2 * linear, "update": 2 * linear}


def test_an_export_after_a_checkpoint_stages_as_much_as_a_publish():
    arch = architecture_of(json.loads((MODELS / "Qwen2.5-7B" / "config.json").read_text()))
    for lora in (None, {"rank": 8}):
        actor = ActorConfig(dtype="bfloat16", lora=lora)
        without, exporting = (
            trainer_stages(arch, actor, Load(1024, exports=exports))[0].memory("checkpoint", 2.0**29)
            for exports in (False, True)
        )
        added = {name: size for name, size in exporting.parts.items() if name not in without.parts}
        merged = {} if lora is None else {"weights before merging": exporting.parts["parameters"]}
        assert added == {"staging": 2.0**30} | merged
    assert not load_of(experiment(), arch).exports
    assert load_of(experiment(checkpoint={"hf_every": 2}), arch).exports


def test_a_stage_keeps_what_the_schedule_has_in_flight():
    assert [in_flight(ParallelConfig(pp=4), stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(ParallelConfig(pp=2, vpp=2), 0) == 2.5  # chunks of half a stage: 2 to warm up twice, and one


def arch_of(family: str, tied: bool = False):
    sizes = TinyModelConfig(path="x", family=family, num_layers=4, tie_embeddings=tied)
    return architecture_of(hf_config(sizes))


def actor(world: int, distributed: bool = True, dtype: str = "bfloat16", **parallel: int) -> ActorConfig:
    options = {"world_size": world, "dtype": dtype, "parallel": parallel, "optimizer": {"distributed": distributed}}
    return ActorConfig.model_validate(options)


@pytest.mark.parametrize(
    ("distributed", "dtype", "bytes_a_parameter"),
    [(True, "bfloat16", 14), (True, "float32", 16), (False, "bfloat16", 14), (False, "float32", 12)],
)
def test_files_hold_weights_and_state(distributed: bool, dtype: str, bytes_a_parameter: int):
    arch = arch_of("qwen3")
    cost = checkpoint_cost(arch, actor(2, distributed, dtype), 8)
    assert cost.file_bytes == parameter_counts(arch).total * bytes_a_parameter
    assert cost.read_bytes == 2 * cost.file_bytes


LAYOUTS = [{}, {"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2, "tp": 2}]


@pytest.mark.parametrize(
    ("family", "parallel"),
    [*((family, layout) for family in ("qwen3", "qwen3_moe") for layout in LAYOUTS), ("qwen3_moe", {"ep": 4})],
)
def test_own_parts_of_all_ranks_are_the_files(family: str, parallel: dict[str, int]):
    cost = checkpoint_cost(arch_of(family), actor(8, **parallel), ranks_per_node=8)
    assert cost.save_host_bytes[False] == pytest.approx(cost.file_bytes)


def test_one_rank_of_a_data_parallel_group_gathers():
    arch = arch_of("qwen3")
    parameters = parameter_counts(arch).total
    cost = checkpoint_cost(arch, actor(2), ranks_per_node=1)
    laid_out, whole, in_transit = parameters * 12 / 2, parameters * 12, parameters * 12
    assert cost.save_host_bytes == {False: parameters * 14 / 2, True: laid_out + whole + in_transit}
    assert cost.resume_host_bytes == parameters * 12


def test_experts_are_gathered_after_the_dense_part():
    arch = arch_of("qwen3_moe")
    counts = parameter_counts(arch)
    cost = checkpoint_cost(arch, actor(2, ep=2), ranks_per_node=1)
    dense, expert = (counts.dense, counts.expert / 2)  # of rank 0, which gathers the one and is alone with the other
    assert cost.save_host_bytes[True] == dense * 12 + expert * (12 + 12 + 12)


def test_tied_stages_both_hold_the_embedding():
    arch = arch_of("qwen3", tied=True)
    shared = arch.vocab_size * arch.hidden_size
    costs = [checkpoint_cost(arch, actor(2, pp=pp), 8).file_bytes for pp in (1, 2)]
    assert costs[1] - costs[0] == shared * 12
    whole = checkpoint_cost(arch, actor(2, pp=2, distributed=False), 8).file_bytes
    assert whole == checkpoint_cost(arch, actor(2, distributed=False), 8).file_bytes


def test_check_counts_the_host_memory_of_the_experiments_own_nodes(prepared):
    options = ["actor.world_size=8", "cluster.gpus_per_node=4"]
    assert "of host memory on the fullest node (4 ranks)" in explain(load_config(QUICKSTART, options))


def test_check_says_what_a_save_and_a_resume_cost(prepared):
    options = ["checkpoint.every=5"]
    text = explain(load_config(QUICKSTART, options))
    config = load_config(QUICKSTART)
    cost = checkpoint_cost(architecture_of(hf_config(TinyModelConfig())), config.actor, config.actor.world_size)
    for said in (
        "checkpoint every 5 steps and at the end, 2 kept, resume auto",
        f"a save for this layout alone: {cost.file_bytes / 1e6:.3g} MB, {cost.file_bytes / 1e10:.2g} s at 10 GB/s; ",
        f"{cost.save_host_bytes[True] / 1e6:.3g} MB of host memory on the fullest node (2 ranks)",
        f"a resume: reads {cost.read_bytes / 1e6:.3g} MB (checksums, then the state)",
    ):
        assert said in text, text


def test_a_type_of_gradients_that_only_the_library_can_refuse_ends_no_plan():
    optimizer = {"megatron": {"use_precision_aware_optimizer": True, "main_grads_dtype": "float17"}}
    assert optimizer_bytes(ActorConfig.model_validate({"dtype": "bfloat16", "optimizer": optimizer})).gradient == 4


def test_checkpoints_of_an_earlier_start_are_on_the_disk_already(tmp_path, monkeypatch):
    config = load_config(QUICKSTART, [f"output_dir={tmp_path}", "checkpoint.keep=2"])
    arch = architecture_of(hf_config(TinyModelConfig()))
    free = int(1.5 * checkpoint_cost(arch, config.actor, 2).file_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    assert "checkpoint.keep takes fewer" in disk_advice(config, arch)[0]
    for step in (5, 10):
        (config.run_folder.checkpoints / f"step_{step:06d}").mkdir(parents=True)
    assert disk_advice(config, arch) == []
    exports = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"hf_every": 1, "keep": 4})})
    alone = exports.model_copy(update={"checkpoint": exports.checkpoint.model_copy(update={"hf_every": 0})})
    on_disk = [checkpoint_lines(each, arch, False)[-1] for each in (exports, alone)]
    size = checkpoint_cost(arch, config.actor, 2).file_bytes + 4 * parameter_counts(arch).total
    assert gigabytes(5 * size) in on_disk[0] and on_disk[0] != on_disk[1]


def test_a_folder_that_this_user_may_not_search_ends_no_check(tmp_path, monkeypatch):
    found = os.stat

    def stat(path, *options, **more):
        if str(path).startswith(f"{tmp_path}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return found(path, *options, **more)

    config = load_config(QUICKSTART, [f"output_dir={tmp_path}/runs/mine"])
    arch = architecture_of(hf_config(TinyModelConfig()))
    monkeypatch.setattr(os, "stat", stat)
    assert disk_advice(config, arch) == []


def test_a_search_of_many_nodes_tries_no_more_ways_to_share_them(monkeypatch):
    tried: list[int] = []
    monkeypatch.setattr(search, "_best_engines", lambda config, target, nodes: tried.append(nodes) or [])
    config = load_config(QUICKSTART)
    target = SimpleNamespace(gpus_per_node=8)
    for nodes in (12, 48, 49, 256, 1000, 4096):
        tried.clear()
        assert not list(search._apart(config, target, nodes))
        assert 11 <= len(tried) < 25, nodes


def test_a_search_proposes_shared_gpus_as_a_run_takes_them(monkeypatch):
    words = ["rollout.max_staleness=2", "rollout.prefix_cache=by_version", "algorithm.mismatch.weight={name: tis}"]
    config = load_config(QUICKSTART, words, judge=broken_as_read)
    tried: list[ExperimentConfig] = []
    monkeypatch.setattr(search, "_best_trainers", lambda config, target, nodes: [config.actor])
    monkeypatch.setattr(search, "_best_engines", lambda config, target, nodes: tried.append(config) or [])
    assert not list(search._colocated(config, None, 1))
    assert tried and not [text for each in tried for _, text in broken_as_read(each)]


@pytest.mark.parametrize(("most", "holds"), [(8192, True), (32000, False)])
def test_a_search_keeps_engines_that_hold_an_evaluation(most, holds):
    file = MODELS.parent / "qwen3_235b_a22b.yaml"
    words = ["sampling.max_response_tokens=8192", f"eval.max_response_tokens={most}"]
    config = with_model(load_config(file, words))
    small = config.rollout.model_copy(update={"sglang": {"max_total_tokens": 12000}})
    config = config.model_copy(update={"rollout": small})
    assert bool(search._best_engines(config, target_of(with_model(load_config(file))), 8)) == holds


def test_caches_of_engines_are_on_the_host_of_the_trainers_only_node():
    hierarchical = "rollout.sglang={enable_hierarchical_cache: true, hicache_size: null, hicache_ratio: 2.0}"
    config = with_model(load_config(MODELS.parent / "qwen3_8b_gsm8k.yaml", [hierarchical]))
    sides = experiment_memory(config, described_architecture(config))
    parts, caches = sides.trainers.host_bytes, 2 * sides.engine.parts["cache"] * config.engine_ranks
    trained = sum(parts.values()) - min(parts["checkpoint"], parts["resume"])
    peaks = [host_peak(config, sides.trainers, sides.engine, gpus) for gpus in (4, 8)]
    assert peaks == pytest.approx([max(trained, caches), trained + caches])
