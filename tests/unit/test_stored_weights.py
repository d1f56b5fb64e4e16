"""Files of weights that are not those of config.json are refused by `check`, before ranks start, and by the ranks that
load them: in one message with the folder and the first names."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import preflight
from megagrpo.models.table import architecture_of
from megagrpo.tools.certify.tiny_model import hf_config, random_tensors
from megagrpo.weights.actor_weights import load_initial_weights
from megagrpo.weights.hf_folder import INDEX
from tests.experiments import QUICKSTART, read_experiment

Tensors = dict[str, Tensor]
EXPERT = "model.layers.2.mlp.experts.5.down_proj.weight"
START = Path("runs/quickstart/random")  # sft.model of the quickstart
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def tiny_model(folder: Path, change: Callable[[Tensors], Tensors] = dict, **sizes) -> Path:
    """Writes the tensors that `change` makes of a random model's."""
    hf = hf_config(TinyModelConfig(**sizes))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    tensors = change(random_tensors(architecture_of(hf), torch.Generator().manual_seed(0)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def refused_at_load(folder: Path) -> str:
    arch = architecture_of(json.loads((folder / "config.json").read_text()))
    actor = SimpleNamespace(arch=arch, parameters=dict, map_tables=lambda hf: None)
    with pytest.raises(ValueError) as refused:
        load_initial_weights(actor, folder)
    return str(refused.value)


def without_an_expert(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != EXPERT}


def with_an_adapter(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 128)}


def with_a_value_head(tensors: Tensors) -> Tensors:
    return tensors | {"score.weight": torch.ones(1, 128)}


def of_another_prefix(tensors: Tensors) -> Tensors:
    return {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}


def fused(tensors: Tensors) -> Tensors:
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(4):
        own = f"model.layers.{layer}.mlp.experts."
        parts = [[tensors[f"{own}{e}.{kind}_proj.weight"] for e in range(8)] for kind in ("gate", "up", "down")]
        out[own + "gate_up_proj"] = torch.cat([torch.stack(parts[0]), torch.stack(parts[1])], 1)
        out[own + "down_proj"] = torch.stack(parts[2])
    return out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_an_expert, f"it lacks 1 of its 135: {EXPERT}$"),
        (with_an_adapter, r"has 1 that a qwen3_moe model has not: .*q_proj.lora_A.weight; merge the adapters"),
        (with_a_value_head, "it has 1 that a qwen3_moe model has not: score.weight$"),
        (of_another_prefix, r"lacks 134 of its 135: .*, \.\.\. and has 134 .*: model.language_model"),
        (fused, r"lacks 96 of its 135: .* and has 8 .*experts.gate_up_proj.*; experts are fused here"),
    ],
)
def test_tensors_of_another_model_are_refused(prepared, change, said):
    tiny_model(START, change)
    [problem] = preflight(read_experiment(QUICKSTART))
    start = rf"{START}: the tensors are not those of config.json: "
    assert re.search(f"^sft.model: {start}.*{said}", problem), problem
    assert problem == f"sft.model: {refused_at_load(START)}", "the ranks say the same"


def test_adapters_beside_a_model_are_refused_whose_users_expect_them_in_it(prepared):
    """transformers adds them when it loads the folder, or loads the model that they name in its place."""
    tiny_model(START)
    (START / "adapter_config.json").write_text('{"base_model_name_or_path": "another"}')
    [problem] = preflight(read_experiment(QUICKSTART))
    assert "it has adapter_config.json, whose adapters" in problem and "merge_and_unload" in problem
    assert problem == f"sft.model: {refused_at_load(START)}", "the ranks say the same"
    (START / "config.json").unlink()
    problems = preflight(read_experiment(QUICKSTART, [f"model.path={START}"]))
    assert any("holds no config.json" in each and "merge_and_unload" in each for each in problems), problems
    for wrong in (START, START / "adapter_config.json"):
        problems = preflight(read_experiment(QUICKSTART, [f"sft.model={wrong}"]))
        assert any(each.startswith(f"sft.model: {wrong} holds no config.json") for each in problems), problems


def test_a_model_whose_experts_are_fused_gets_no_remedy_for_that(tmp_path):
    more = {"model.language_model.layers.9.mlp.experts.gate_up_proj": torch.ones(2, 2)}
    problem = refused_at_load(tiny_model(tmp_path, lambda tensors: tensors | more, family="qwen3_vl_moe"))
    assert problem.endswith(f"has 1 that a qwen3_vl_moe model has not: {min(more)}")


def test_a_model_as_it_should_be_or_without_weights_is_no_problem(prepared):
    assert preflight(read_experiment(QUICKSTART)) == [], "a description"
    tiny_model(START)
    assert preflight(read_experiment(QUICKSTART)) == []


def test_an_interrupted_download_is_found(prepared):
    tiny_model(START)
    shard = "model-00002-of-00002.safetensors"
    (START / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    [problem] = preflight(read_experiment(QUICKSTART))
    assert problem == f"sft.model: {START}/{shard}: missing, but {INDEX} names it: the download is incomplete"


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "pytorch_model.bin", "model.gguf"])
def test_weights_that_no_trainer_reads_are_no_description(prepared, name):
    tiny_model(START)
    (START / "model.safetensors").rename(START / name)
    [problem] = preflight(read_experiment(QUICKSTART))
    assert problem == f"sft.model: {refused_at_load(START)}" and "has neither model.safetensors nor" in problem


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "config.json", "tokenizer.json"])
def test_pointers_of_git_lfs_are_named(prepared, name):
    tiny_model(START)
    (START / name).write_text(POINTER)
    try:
        problems = preflight(read_experiment(QUICKSTART))
    except ValueError as exc:
        problems = [str(exc)]
    assert f"{START}/{name}: " in problems[0] and f"run `git lfs pull` in {START}" in problems[0], problems


def own_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 0.01}


def same_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def test_a_tied_model_may_store_its_output_layer_only_if_it_is_the_embedding(prepared):
    tiny_model(START, same_head, tie_embeddings=True)
    assert preflight(read_experiment(QUICKSTART)) == []
    tiny_model(START, own_head, tie_embeddings=True)
    [problem] = preflight(read_experiment(QUICKSTART))
    assert "lm_head.weight is not model.embed_tokens.weight: set tie_word_embeddings: false" in problem
    assert problem == f"sft.model: {refused_at_load(START)}"
    description = json.loads((START / "config.json").read_text())
    (START / "config.json").write_text(json.dumps(description | {"tie_word_embeddings": False}))
    assert preflight(read_experiment(QUICKSTART)) == [], "the remedy"
