"""Settings for a library: its fields are read from its source, values checked by type, some refused with a reason."""

import dataclasses
import re
from fnmatch import fnmatchcase

import pytest

from megagrpo.config.fields import annotations_at
from megagrpo.config.libraries.megatron import MEGATRON_SETTINGS, SettingsTable
from megagrpo.config.libraries.source import refusal_of
from megagrpo.config.load import ConfigError, load_config
from megagrpo.config.schema import ExperimentConfig
from tests.experiments import QUICKSTART

VIRTUAL = ["actor.world_size=4", "actor.parallel.pp=2", "actor.parallel.vpp=2"]
OWN_LAYERS = ["actor.transformer_engine=false", "actor.recompute=selective"]
MESSAGES = [*VIRTUAL, "actor.megatron.overlap_p2p_comm=true"]


@pytest.mark.parametrize("table", MEGATRON_SETTINGS, ids=lambda table: ".".join(table.path))
def test_every_refusal_fits_a_field_and_names_a_key(table: SettingsTable):
    assert [pattern for pattern in table.refused if not any(fnmatchcase(name, pattern) for name in table.fields)] == []
    for refusal in table.refused.values():
        keys = tuple(refusal.instead.split("."))
        settings = next((t for t in MEGATRON_SETTINGS if t.path == keys[:-1]), None)
        free = settings is not None and refusal_of(keys[-1], settings.refused) is None
        assert not refusal.instead or annotations_at(ExperimentConfig, keys) or free, refusal.instead


def test_the_source_says_what_the_imported_classes_say():
    from megagrpo.actor.host import prepare_host

    prepare_host()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    classes = (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    for table, kind in zip(MEGATRON_SETTINGS, classes, strict=True):
        assert set(table.fields) == {field.name for field in dataclasses.fields(kind)}
        for field in dataclasses.fields(kind):
            if type(field.default) in (int, float, bool, str, type(None)):
                assert table.fields[field.name].default == field.default, field.name


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("moe_deepep_num_sms", [5], [5.0, True, "5", None]),
        ("apply_rope_fusion", [True], [1, "true", None]),
        ("fp8", ["hybrid", None], [3]),
        ("attention_backend", ["flash"], ["Flash", 2]),
        ("cp_comm_type", ["p2p", ["p2p", "a2a"], None], [["p2p", 1], 1]),
        ("recompute_modules", [["mlp"], None], ["mlp", [1]]),
        ("moe_flex_dispatcher_backend", ["deepep"], ["other"]),
        ("autocast_dtype", ["bfloat16", "fp8", None], ["bf16", 16]),
        ("activation_func", [], ["silu", None]),
    ],
)
def test_a_value_is_checked_against_the_annotation(name, right, wrong):
    field = MEGATRON_SETTINGS[0].fields[name]
    assert [value for value in right if not field.accepts(value)] == []
    assert [value for value in wrong if field.accepts(value)] == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.megatron.moe_permute_fusoin=true"], "no such field; did you mean 'moe_permute_fusion'"),
        (["actor.megatron.no_such_thing_at_all=1"], "Megatron's TransformerConfig has no such field"),
        (["actor.megatron.tensor_model_parallel_size=2"], "set actor.parallel.tp"),
        (["actor.megatron.calculate_per_token_loss=false"], "Megatron must only sum"),
        (["actor.megatron.hidden_dropout=0.1"], "ratio of new to old probabilities"),
        (["actor.megatron.attention_backend=flsh"], "one of flash, fused, unfused, local, auto"),
        (["actor.megatron.recompute_modules=mlp"], r"should be Optional\[List\[str\]\], as Megatron declares it"),
        (["actor.ddp.average_in_collective=true"], "gradients are sums"),
        (["actor.ddp.grad_reduce_in_fp32=false"], "set actor.optimizer.megatron.main_grads_dtype"),
        (["actor.optimizer.megatron.loss_scale=2.0"], "gradients are not scaled"),
        (["actor.optimizer.megatron.exp_avg_dtype=bf16"], "one of float32, float16, bfloat16, fp8"),
        (["actor.megatron.recompute_modules=[mlp]"], "read with actor.recompute selective .*, which is none"),
        (["actor.recompute=selective", "actor.megatron.recompute_num_layers=2"], "actor.recompute full"),
        ([*OWN_LAYERS, "actor.megatron.recompute_modules=[mlp, moe_act]"], "moe_act: only with Transformer Engine's"),
        ([*OWN_LAYERS, "actor.megatron.fp8=hybrid"], "needs Transformer Engine's layers"),
        (["actor.lora.rank=4", "actor.ddp.overlap_grad_reduce=true"], "with lora, replicas of experts"),
        (["actor.optimizer.distributed=false", "actor.ddp.overlap_param_gather=true"], "sharded"),
        (["actor.megatron.overlap_p2p_comm=true"], "messages overlap only in the schedule of virtual stages"),
        (["actor.ddp.align_param_gather=true"], "in others each would be waited for"),
        ([*MESSAGES, "actor.megatron.deallocate_pipeline_outputs=true"], "frees an output that it is still sending"),
        ([*MESSAGES, "actor.megatron.batch_p2p_comm=true"], "with overlap_p2p_comm messages are sent one by one"),
        ([*VIRTUAL, "actor.megatron.batch_p2p_comm=true"], "a batch mixes up what is for which"),
        (["actor.optimizer.megatron.optimizer_cpu_offload=true"], "with actor.dtype float32 there are none"),
        (["actor.dtype=bfloat16", "actor.optimizer.megatron.exp_avg_dtype=bfloat16"], "use_precision_aware_optimizer"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_key(overrides, message):
    """One of each kind; docs/reference/configuration.md, which a test compares, has all refusals."""
    with pytest.raises(ConfigError, match=message) as error:
        load_config(QUICKSTART, overrides)
    assert f"--set {overrides[-1]}: {overrides[-1].partition('=')[0]} = " in str(error.value)


def test_problems_of_all_maps_come_with_their_lines(tmp_path):
    actor = "actor:\n  megatron:\n    apply_rope_fusion: 1\n    tp: 2\n  ddp: {bucket_size: x}\n"
    text = QUICKSTART.read_text().replace("actor:\n", actor, 1)
    text = re.sub(r"^rollout: .*$", "rollout:\n  sglang:\n    page_sise: 1\n    page_size: x", text, flags=re.MULTILINE)
    (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "e.yaml")
    megatron, sglang = (text.splitlines().index(f"  {section}:") + 1 for section in ("megatron", "sglang"))
    found = [problem.strip().removeprefix(f"{tmp_path}/") for problem in str(error.value).splitlines()[1:]]
    lines = [megatron + 1, megatron + 2, megatron + 3, sglang + 1, sglang + 2]
    assert [problem.split(": ")[0] for problem in found] == [f"e.yaml:{line}" for line in lines]
    assert "rollout.sglang.page_sise = 1: SGLang's ServerArgs has no such field" in found[3]
    assert "rollout.sglang.page_size = 'x': should be Optional[int]" in found[4]
