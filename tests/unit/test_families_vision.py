"""Families that see: what config.json says, tensors by arithmetic beside transformers' modules, layouts, plans."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megagrpo.cpu.engine.sitecustomize  # noqa: F401  before transformers, whose models load torchvision, see there

# isort: split
import transformers
from safetensors.torch import save_file

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import layout_problems
from megagrpo.config.actor import ActorConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.table import architecture_of, model_problems, model_tensors, parameter_counts, patch_cost
from megagrpo.tools.certify.tiny_model import hf_config, random_tensors
from megagrpo.tools.plan.trainer_memory import stage_parameters, trained_elements
from megagrpo.weights.actor_weights import load_initial_weights
from tests.experiments import ROOT

QWEN2_5_VL_7B, QWEN3_VL_30B = (
    json.loads((ROOT / "configs" / "models" / name / "config.json").read_text())
    for name in ("Qwen2.5-VL-7B-Instruct", "Qwen3-VL-30B-A3B-Instruct")
)
DENSE = {key: value for key, value in QWEN3_VL_30B["text_config"].items() if "expert" not in key}
QWEN3_VL = QWEN3_VL_30B | {"model_type": "qwen3_vl", "text_config": DENSE | {"num_hidden_layers": 36}}
MODELS = {"qwen2_5_vl": QWEN2_5_VL_7B, "qwen3_vl": QWEN3_VL, "qwen3_vl_moe": QWEN3_VL_30B}


def on_meta(family: str, tmp_path: Path) -> torch.nn.Module:
    """transformers' model of a published config.json, without memory."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[family]))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        return transformers.AutoModelForImageTextToText.from_config(config)


@pytest.mark.parametrize("family", MODELS)
def test_tensors_are_those_of_transformers_model(family: str, tmp_path: Path):
    arch = architecture_of(MODELS[family])
    expected = {name: tuple(p.shape) for name, p in on_meta(family, tmp_path).named_parameters()}
    if family == "qwen2_5_vl":  # names on disk
        expected = {
            name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): shape
            for name, shape in expected.items()
        }
    if family == "qwen3_vl_moe":  # the published layout: transformers turns it when it loads
        expected = {
            name: (shape[0], shape[2], shape[1]) if ".experts." in name else shape for name, shape in expected.items()
        }
    assert {spec.name: spec.shape for spec in model_tensors(arch)} == expected


def test_the_cost_of_a_patch():
    """Qwen2.5-VL's tower: 32 layers of width 1280, a gated MLP of 3420, a merger to 3584 that takes four patches."""
    arch = architecture_of(QWEN2_5_VL_7B)
    merger = (5120 * 5120 + 5120 * 3584) // 4
    tower = 3 * 2 * 14 * 14 * 1280 + 32 * (4 * 1280 * 1280 + 3 * 1280 * 3420) + merger
    text = 28 * (2 * 3584 * (28 + 4) * 128 + 3 * 3584 * 18944) + 3584 * 152064
    assert arch.vision.products_of_a_patch == tower and patch_cost(arch) == pytest.approx(tower / text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": None}, "lacks vision_config"),
        ({"image_token_id": None}, "lacks image_token_id"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mrope_section": [16, 24, 24]}}, "rope scaling .*yarn"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 20]}}, r"mrope_section .* the sum 64, half"),
        ({"rope_scaling": None}, "lacks mrope_section"),
        ({"hidden_size": 1792}, "out_hidden_size 3584 is not hidden_size 1792"),
        ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
    ],
)
def test_refusals(change: dict, message: str):
    hf = {key: value for key, value in (QWEN2_5_VL_7B | change).items() if value is not None}
    if "hidden_size" in change:
        hf |= {"head_dim": 128}
    problems = "; ".join(model_problems(hf))
    assert re.search(message, problems), problems


def test_fused_experts_in_fp8_are_refused():
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert model_problems(QWEN3_VL | {"quantization_config": fp8}) == []
    [problem] = model_problems(QWEN3_VL_30B | {"quantization_config": fp8})
    assert problem.endswith("are not read; name the bfloat16 release of the model")


CONFIGS = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe"}


@pytest.mark.parametrize("family", MODELS)
def test_a_tower_may_leave_out_what_transformers_fills_in(family: str):
    defaults = getattr(transformers, f"{CONFIGS[family]}Config")().vision_config.to_dict()
    defaults = {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}
    full = MODELS[family]["vision_config"]
    sparse = {key: value for key, value in full.items() if key not in defaults or value != defaults[key]}
    assert len(sparse) < len(full)
    read = architecture_of(MODELS[family] | {"vision_config": sparse}).vision
    assert replace(read, config=full) == architecture_of(MODELS[family]).vision
    wide = {"hidden_size": defaults["out_hidden_size"], "head_dim": 128}
    found = MODELS[family] | {"vision_config": {}}
    found = found | (wide if "text_config" not in found else {"text_config": found["text_config"] | wide})
    assert architecture_of(found).vision.config.items() <= defaults.items()


def test_experts_that_transformers_5_has_transposed_are_refused(tmp_path: Path):
    hf = hf_config(TinyModelConfig(path="x", family="qwen3_vl_moe"))
    (tmp_path / "config.json").write_text(json.dumps(hf))
    tensors = random_tensors(architecture_of(hf), torch.Generator().manual_seed(0))
    name, before = "model.language_model.layers.0.mlp.experts.gate_up_proj", len(tensors)
    tensors |= {key: t.transpose(1, 2).contiguous() for key, t in tensors.items() if ".mlp.experts." in key}
    assert len(tensors) == before and tensors[name].dim() == 3
    save_file(tensors, tmp_path / "model.safetensors")
    experts, wide, hidden = tensors[name].shape
    shapes = f"{name} has the shape ({experts}, {wide}, {hidden}), but ({experts}, {hidden}, {wide}) by config.json"
    with pytest.raises(ValueError, match=f"{re.escape(shapes)}; transformers 5 saves experts transposed"):
        load_initial_weights(SimpleNamespace(arch=architecture_of(hf), parameters=dict), tmp_path)


def test_the_text_part_is_read_wherever_it_stands():
    keys = ("architectures", "model_type", "image_token_id", "video_token_id", "vision_start_token_id", "vision_config")
    nested = {key: QWEN2_5_VL_7B[key] for key in keys}
    nested["text_config"] = {key: value for key, value in QWEN2_5_VL_7B.items() if key not in keys}
    assert architecture_of(nested) == architecture_of(QWEN2_5_VL_7B)


def layout(arch: Architecture, **actor) -> str:
    return "; ".join(layout_problems(arch, ActorConfig.model_validate(actor)))


def test_features_of_the_first_layers_need_these_in_the_first_stage():
    arch = architecture_of(QWEN3_VL_30B)
    assert not layout(arch, world_size=8, parallel={"pp": 8})
    problem = layout(arch, world_size=8, parallel={"pp": 8, "vpp": 3})
    assert "first stage has 2 layers" in problem and "behind the model's first 3" in problem
    ends = {"pp": 8, "first_stage_layers": 2, "last_stage_layers": 4}
    assert "first stage has 2 layers" in layout(arch, world_size=8, parallel=ends)
    assert not layout(architecture_of(QWEN2_5_VL_7B), world_size=14, parallel={"pp": 14, "vpp": 2})


def test_what_cannot_see_has_no_tower_and_adapters_have_none():
    text = architecture_of({**QWEN3_VL_30B["text_config"], "model_type": "qwen3_moe", "rope_scaling": None})
    assert "are text-only" in layout(text, vision={"train": "none"})
    assert "not supported with a qwen3_vl_moe model" in layout(architecture_of(QWEN3_VL_30B), lora={})
    assert "fused kernel" in layout(architecture_of(QWEN3_VL_30B), megatron={"apply_rope_fusion": True})


def test_the_tower_is_planned_on_the_first_stage_and_in_engines():
    arch = architecture_of(QWEN2_5_VL_7B)
    tower = sum(spec.size for spec in arch.vision.tensors())
    merger = sum(spec.size for spec in arch.vision.tensors() if "merger" in spec.name)

    def held(train: str) -> tuple[float, float, float]:
        cut = {"world_size": 8, "parallel": {"tp": 2, "pp": 4}}
        actor = ActorConfig.model_validate({**cut, "vision": {"train": train}})
        first, second, *_ = stage_parameters(arch, actor)
        return (first.dense - second.dense, first.trained_dense - second.trained_dense, trained_elements(arch, actor))

    embedding, whole = arch.vocab_size * arch.hidden_size // 2, parameter_counts(arch).total
    assert held("all") == (embedding + tower, embedding + tower, whole)
    assert held("projector") == (embedding + tower, embedding + merger, whole - tower + merger)
    assert held("none") == (embedding + tower, embedding, whole - tower)
    assert arch.vision.engine_weights(1) == tower and tower / 2 < arch.vision.engine_weights(2) < 0.51 * tower
