"""INT4 checkpoints and Kimi-K2.5's text part: unpacked as the format says, a part as its whole, refused by name."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.models.config_json import text_part
from megagrpo.models.folder import Model, write_description
from megagrpo.models.stored import packed_int4
from megagrpo.models.stored.quantization import int4_group, quantization_problems
from megagrpo.models.table import architecture_of, left_out, model_problems, model_tensors, read_description
from megagrpo.weights.hf_folder import HfFolder
from tests.installed import installed_function
from tests.int4_checkpoint import GROUP, QUANTIZATION, pack_folder, packed, quantized

pytestmark = pytest.mark.verifies(
    "weights", "INT4 checkpoints (Kimi-K2.5, K2-Thinking) are read to the bits of compressed-tensors"
)
MODELS = Path(__file__).parents[2] / "configs" / "models"
GROUPED = QUANTIZATION["config_groups"]["group_0"]["weights"]


def with_weights(**changes) -> dict:
    group = QUANTIZATION["config_groups"]["group_0"] | {"weights": GROUPED | changes}
    return QUANTIZATION | {"config_groups": {"group_0": group}}


def folder_of(path, tensors, quantization=QUANTIZATION):
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return path


def test_a_word_holds_eight_columns_from_its_low_end():
    """By hand: 0x0123CDEF is, from the right, 15 14 13 12 3 2 1 0, each less 8; its sign is a bit."""
    words = torch.tensor([[0x0123CDEF, -1, -(1 << 31)]], dtype=torch.int32)
    assert packed_int4.unpacked(words).tolist() == [[7, 6, 5, 4, -5, -6, -7, -8] + [7] * 8 + [-8] * 7 + [0]]
    values = torch.randint(-8, 8, (5, 64), dtype=torch.int32)
    assert torch.equal(packed_int4.unpacked(packed(values)), values)


def test_every_part_is_what_compressed_tensors_reads(tmp_path):
    """Boxes begin and end within words and groups."""
    torch.manual_seed(0)
    values, scales = quantized(torch.randn(6, 96) * torch.rand(6, 1))
    tensors = {"a.weight_packed": packed(values), "a.weight_scale": scales}
    tensors["a.weight_shape"] = torch.tensor([6, 96], dtype=torch.int32)
    hf = HfFolder(folder_of(tmp_path / "int4", tensors))
    assert hf.specs == {"a.weight": ((6, 96), torch.bfloat16)}
    file = "compressors/pack_quantized/helpers.py"
    unpack = installed_function("compressed_tensors", file, "unpack_from_int32")
    theirs = unpack(tensors["a.weight_packed"], 4, torch.Size((6, 96)))
    wanted = theirs.to(torch.bfloat16) * scales.repeat_interleave(GROUP, 1)
    assert torch.equal(theirs.int(), values) and torch.equal(hf["a.weight"], wanted)
    for top, left, size in product((0, 2), (0, 5, 32, 61), ((1, 1), (3, 35), (4, 30))):
        box = torch.full(size, torch.nan, dtype=torch.float32)
        hf.read_into(box, "a.weight", (top, left))
        assert torch.equal(box, wanted[top:, left:][: size[0], : size[1]].float())
    assert hf.stored_bytes("a.weight", (6, 96)) == 288


def test_damage_and_other_formats_are_named(tmp_path):
    values, scales = quantized(torch.randn(4, 64))
    tensors = {"a.weight_packed": packed(values), "a.weight_scale": scales[:, :1].contiguous()}
    with pytest.raises(ValueError, match=r"a.weight \[4, 64\] in INT4 needs a scale for each 32"):
        HfFolder(folder_of(tmp_path / "few", tensors))
    with pytest.raises(ValueError, match="a.weight is in INT4, but config.json has no"):
        HfFolder(folder_of(tmp_path / "none", tensors, None))
    for key, value in (
        ("num_bits", 8),
        ("type", "float"),
        ("strategy", "channel"),
        ("symmetric", False),
        ("actorder", "group"),
        ("dynamic", True),
        ("group_size", 12),
        ("group_size", None),
    ):
        [problem] = quantization_problems({"quantization_config": with_weights(**{key: value})})
        assert f"{key} {value!r}" in problem and "pack-quantized" in problem
    assert int4_group({"quantization_config": QUANTIZATION}) == GROUP and int4_group({}) is None
    k2 = read_description(MODELS / "Kimi-K2-Instruct" / "config.json")
    assert model_problems(k2 | {"quantization_config": QUANTIZATION}) == [], "K2-Thinking's"
    described = text_part(read_description(MODELS / "Kimi-K2.5" / "config.json"))
    weights = described["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert {key: weights[key] for key in GROUPED} == GROUPED


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A tiny Kimi-K2.5 as it is published, and its bfloat16 twin."""
    folder = tmp_path_factory.mktemp("kimi")
    make_tiny_model(TinyModelConfig(path=str(folder / "float32"), family="kimi_k25"), seed=0)
    pack_folder(folder / "float32", folder / "model", folder / "twin")
    return folder


def test_the_text_part_is_read_under_the_names_of_a_text_model(published):
    model, twin = Model.read(published / "model"), HfFolder(published / "twin")
    read = HfFolder(published / "model")
    assert {spec.name for spec in model_tensors(model.arch)} == twin.keys()
    assert all(torch.equal(read[name], twin[name]) for name in twin)
    rest = sorted(read.keys() - twin.keys())
    assert [name.split(".")[0] for name in rest] == ["mm_projector", "vision_tower"]
    assert not model.sees_images and model.arch.family == "kimi_k25"
    assert replace(model.arch, family="deepseek_v3") == Model.read(published / "twin").arch
    assert left_out(model.description) == [
        f"{name}*: only texts are trained" for name in ("vision_tower.", "mm_projector.")
    ]


def test_what_is_exported_is_a_text_model_in_bfloat16(published, tmp_path):
    write_description(published / "model", tmp_path / "out", torch.bfloat16)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model_type"] == "deepseek_v3" and written["dtype"] == "bfloat16"
    assert written["architectures"] == ["DeepseekV3ForCausalLM"]
    assert not written.keys() & {"text_config", "vision_config", "quantization_config"}
    assert architecture_of(written) == Model.read(published / "twin").arch
