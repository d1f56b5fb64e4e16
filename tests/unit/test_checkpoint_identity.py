"""Checkpoints of every version belong to the model that wrote them, and to no other."""

import json
from types import SimpleNamespace

import pytest

from examples.laptop.recipe import TinyModelConfig
from megagrpo.checkpoint.identity import adapter_numbers, architecture_numbers, differences
from megagrpo.checkpoint.resume import run_identity
from megagrpo.config.actor import LoraConfig
from megagrpo.models.table import FAMILIES, architecture_of
from megagrpo.tools.certify.tiny_model import hf_config
from tests.experiments import experiment
from tests.unit.package_source import ROOT

# config.json of a tiny model of each family, and what the first form of state.json had of it
FIRST_FORM = json.loads((ROOT / "tests" / "golden" / "identities_0_1_0.json").read_text())


@pytest.mark.parametrize("family", FIRST_FORM)
def test_a_first_checkpoint_is_of_the_same_model(family: str):
    case = FIRST_FORM[family]
    own = {"model": architecture_numbers(architecture_of(case["config"])), "dtype": "float32"}
    assert differences({"model": case["identity"], "dtype": "float32"}, own) == []
    assert differences(json.loads(json.dumps(own)), own) == []
    assert FIRST_FORM.keys() <= FAMILIES.keys()


@pytest.mark.parametrize(("family", "kind"), [("qwen3_5", "delta"), ("nemotron_h", "mamba")])
def test_recurrent_layers_of_every_name_are_compared(family: str, kind: str):
    own = {"model": architecture_numbers(architecture_of(hf_config(TinyModelConfig(path="x", family=family))))}
    saved = {key.replace("recurrent.", f"{kind}."): number for key, number in own["model"].items()}
    assert saved != own["model"] and differences({"model": saved}, own) == []
    (text,) = differences({"model": saved | {f"{kind}.kernel": 3}}, own)
    assert text == "model.recurrent.kernel: checkpoint 3, this run 4"


@pytest.mark.parametrize(("key", "number", "name"), [
    ("num_heads", 8, "attention.heads"), ("num_experts", 16, "experts.count"),
    ("rope_theta", 5e5, "attention.rotary.theta"),
    ("tied", True, "tied"), ("norm_topk_prob", False, "experts.norm_topk"), ("centered_norms", True, "centered_norms"),
    ("draft", True, "draft"),
])  # fmt: skip
def test_what_differs_is_named(key: str, number: object, name: str):
    case = FIRST_FORM["qwen3_moe"]
    own = {"model": architecture_numbers(architecture_of(case["config"]))}
    (text,) = differences({"model": case["identity"] | {key: number}}, own)
    assert text.startswith(f"model.{name}: checkpoint {number!r}, this run ")


def test_a_draft_that_is_trained_no_more_has_another_optimizer():
    arch = architecture_of(FIRST_FORM["deepseek_v3"]["config"])
    trained, frozen = (
        run_identity(experiment(actor={"draft": draft}), SimpleNamespace(arch=arch)).model
        for draft in ({}, {"train": False})
    )
    assert differences(trained, frozen) == ["trained_draft: checkpoint True, this run False"]
    assert differences(frozen, trained) == ["trained_draft: checkpoint False, this run True"]
    older = run_identity(experiment(), SimpleNamespace(arch=arch)).model  # said nothing of it
    assert differences(older, frozen) == differences(older, trained) == []


def test_parts_of_a_layer_are_compared():
    for family, part, key in (
        ("deepseek_v3", "mla", "v_dim"),
        ("qwen3_next", "linear", "kernel"),
        ("glm_moe_dsa", "indexer", "topk"),
        ("qwen3_vl", "vision", "depth"),
    ):
        identity = FIRST_FORM[family]["identity"]
        own = {"model": architecture_numbers(architecture_of(FIRST_FORM[family]["config"]))}
        other = identity | {part: identity[part] | {key: 3}}
        (text,) = differences({"model": other}, own)
        assert f"{key}: checkpoint 3" in text


def test_a_setting_that_adapters_gain_is_no_difference():
    lora = LoraConfig(rank=4)
    own = {"lora": adapter_numbers(lora)}
    assert differences({"lora": lora.model_dump()}, own) == []
    earlier = {key: value for key, value in lora.model_dump().items() if key != "alpha"}
    assert differences({"lora": earlier}, own) == []
    assert differences({"lora": lora.model_dump() | {"rank": 8}}, own) == ["lora.rank: checkpoint 8, this run 4"]
