"""What `megagrpo check` says about saves and resumes, against sums by hand and the shares of all ranks."""

import pytest

from examples.laptop.recipe import TinyModelConfig
from megagrpo.certify.tiny_model import hf_config
from megagrpo.config.load import load_config
from megagrpo.config.schema import ActorConfig
from megagrpo.families.table import architecture_of, parameter_counts
from megagrpo.planning.checkpoint_cost import checkpoint_cost
from megagrpo.planning.explain import explain
from tests.experiments import QUICKSTART


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
    assert cost.resume_host_bytes == {False: 0, True: parameters * 12}


def test_experts_are_gathered_after_the_dense_part():
    arch = arch_of("qwen3_moe")
    counts = parameter_counts(arch)
    cost = checkpoint_cost(arch, actor(2, ep=2), ranks_per_node=1)
    dense, expert = counts.dense, counts.expert / 2  # of rank 0, which gathers the one and is alone with the other
    assert cost.save_host_bytes[True] == dense * 12 + expert * (12 + 12 + 12)


def test_tied_stages_both_hold_the_embedding():
    arch = arch_of("qwen3", tied=True)
    shared = arch.vocab_size * arch.hidden_size
    costs = [checkpoint_cost(arch, actor(2, pp=pp), 8).file_bytes for pp in (1, 2)]
    assert costs[1] - costs[0] == shared * 12
    whole = checkpoint_cost(arch, actor(2, pp=2, distributed=False), 8).file_bytes
    assert whole == checkpoint_cost(arch, actor(2, distributed=False), 8).file_bytes


def test_check_says_what_a_save_and_a_resume_cost(prepared):
    options = ["checkpoint.every=5", "checkpoint.keep_gb=2", "checkpoint.disk_gb_s=0.5"]
    text = explain(load_config(QUICKSTART, options))
    config = load_config(QUICKSTART)
    cost = checkpoint_cost(architecture_of(hf_config(TinyModelConfig())), config.actor, config.actor.world_size)
    for said in (
        "2 kept or fewer in 2 GB, resume auto, in the background from two trainer nodes on",
        f"a save for this layout alone: {cost.file_bytes / 1e6:.3g} MB, {cost.file_bytes / 5e8:.2g} s at 0.5 GB/s; ",
        f"{cost.save_host_bytes[True] / 1e6:.3g} MB of host memory on the fullest node (2 ranks)",
        f"a resume: reads {cost.read_bytes / 1e6:.3g} MB (checksums, then the state)",
    ):
        assert said in text, text
