"""FP8 checkpoints are the bfloat16 tensors that SGLang's own routine makes of them, part by part in bounded memory."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megagrpo.check.problems import check_against_model
from megagrpo.config.load import load_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.stored.quantization import dequantized_config, fp8_block, quantization_problems
from megagrpo.models.table import architecture_of
from megagrpo.rollout.service.engine_model import as_engines_see_it
from megagrpo.system.run_folder import RunFolder
from megagrpo.weights.hf_folder import HfFolder, write_hf_folder
from tests.fp8_checkpoint import dequantized, quantized
from tests.installed import installed_function

ROOT = Path(__file__).parents[2]
BLOCK = (128, 128)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
}


def qwen():
    return json.loads((ROOT / "configs/models/Qwen3-235B-A22B/config.json").read_text())


def sglangs():
    file = "srt/layers/quantization/fp8_utils.py"
    return installed_function("sglang", file, "block_quant_dequant")


def write(folder, tensors, quantization=FP8):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    description = {"model_type": "toy"} | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(description))
    return folder


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """576 rows, as kv_a_proj_with_mqa: 4.5 blocks; 300 columns: 2.34. Scales that no power of two hides."""
    torch.manual_seed(0)
    weight, scales = quantized(torch.randn(576, 300) * torch.rand(576, 1), BLOCK)
    tensors = {"a.weight": weight, "a.weight_scale_inv": scales, "norm.weight": torch.rand(7)}
    return write(tmp_path_factory.mktemp("fp8"), tensors), weight, scales


def test_it_is_what_sglangs_own_routine_makes_of_it(stored, tmp_path):
    folder, weight, scales = stored
    expected = sglangs()(weight, scales, list(BLOCK), torch.bfloat16)
    assert torch.equal(dequantized(weight, scales, BLOCK), expected)
    read = HfFolder(folder)
    assert torch.equal(read["a.weight"], expected)
    assert read.specs == {"a.weight": ((576, 300), torch.bfloat16), "norm.weight": ((7,), torch.float32)}
    assert set(read) == set(read.specs) and "a.weight_scale_inv" not in read
    every_code = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None].repeat(3, 1)
    finite = every_code.float().nan_to_num(0.0).to(torch.float8_e4m3fn)
    odd = torch.tensor([[1.7, 0.3]])
    codes = HfFolder(write(tmp_path, {"x": finite, "x_scale_inv": odd}))
    assert torch.equal(codes["x"], sglangs()(finite, odd, list(BLOCK), torch.bfloat16))


def test_any_part_needs_its_own_bytes_and_the_scales_of_its_blocks(stored):
    folder, weight, scales = stored
    expected = dequantized(weight, scales, BLOCK)
    for start, size, blocks in [
        ((0, 0), (576, 300), 15),
        ((288, 0), (288, 300), 9),  # half of the rows: from within block 2 on
        ((100, 127), (30, 2), 4),
        ((575, 299), (1, 1), 1),
        ((128, 128), (128, 128), 1),
    ]:
        read, wanted = HfFolder(folder), expected[start[0] :, start[1] :][: size[0], : size[1]]
        for dtype in (torch.bfloat16, torch.float32):
            target = torch.zeros(size[1], size[0], dtype=dtype).t()  # a view with strides of its own
            read.read_into(target, "a.weight", start)
            assert torch.equal(target, wanted.to(dtype)), (start, size)
        assert read.bytes_read == 2 * (size[0] * size[1] + 4 * blocks)


def test_a_large_tensor_needs_one_bounded_buffer(tmp_path):
    rows, columns = 6000, 3000
    values = torch.randint(0, 120, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), -(-columns // 128))
    folder = HfFolder(write(tmp_path / "large", {"x": values, "x_scale_inv": scales}))
    target = torch.empty(rows, columns, dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        folder.read_into(target, "x", (0, 0))
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert torch.equal(target, dequantized(values, scales, BLOCK))
    # 128 rows in float32, the last ones and the next, a scale for every block and column, and the blocks' numbers
    bound = (128 * 8 + scales.shape[0] * 4 + 32) * columns
    assert 0 < peak <= bound < target.nbytes / 8


def test_damage_is_named(stored, tmp_path):
    _, weight, scales = stored
    with pytest.raises(ValueError, match=r"a.weight is in FP8, but config.json has no quantization_config"):
        HfFolder(write(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scales}, None))
    with pytest.raises(ValueError, match=r"needs scales a.weight_scale_inv of shape \(5, 3\).* the files have none"):
        HfFolder(write(tmp_path, {"a.weight": weight}))
    with pytest.raises(ValueError, match=r"of shape \(5, 3\), .*have \(4, 3\)"):
        HfFolder(write(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scales[:4].contiguous()}))
    with pytest.raises(ValueError, match=r"config.json: quantization_config: pack-quantized weights"):
        HfFolder(write(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scales}, INT4))


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        (
            INT4,
            r"pack-quantized weights in 1 config_groups with strategy None, symmetric None, "
            r"group_size None are not read",
        ),
        ({"quant_method": "gptq", "bits": 4}, r"'gptq' \(4-bit weights\)"),
        ({"quant_method": "mxfp8"}, r"'mxfp8' is not read"),
        ({"quant_method": "fp8"}, r"weight_block_size is None"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (INT4 | {"format": "nvfp4"}, r"'compressed-tensors' \(4-bit weights\) is not read, only FP8"),
        (FP8 | {"fmt": "e5m2"}, r"fmt 'e5m2' is not read; supported: e4m3"),
        (FP8 | {"activation_scheme": "static"}, r"activation_scheme 'static'"),
    ],
)
def test_other_quantization_is_refused_with_the_reason(quantization, reason):
    hf = qwen()
    assert architecture_of(hf | {"quantization_config": FP8}) == architecture_of(hf)
    with pytest.raises(ValueError, match=reason):
        architecture_of(hf | {"quantization_config": quantization})
    assert len(quantization_problems(hf | {"quantization_config": quantization})) == 1
    assert fp8_block(hf) is None and fp8_block({"quantization_config": FP8}) == BLOCK


def test_what_is_written_like_it_is_bfloat16(stored, tmp_path):
    folder, weight, scales = stored
    source = HfFolder(folder)
    write_hf_folder(tmp_path / "out", iter([dict(source)]), folder, torch.bfloat16)
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"model_type": "toy", "dtype": "bfloat16"}
    assert torch.equal(HfFolder(tmp_path / "out")["a.weight"], dequantized(weight, scales, BLOCK))
    assert dequantized_config({"torch_dtype": "float8", "quantization_config": FP8}) == {"torch_dtype": "bfloat16"}
    assert dequantized_config({"torch_dtype": "float32"}) == {"torch_dtype": "float32"}
    inside = {"text_config": {"quantization_config": FP8, "dtype": "float8"}, "vision_config": {}}
    assert dequantized_config(inside) == {"text_config": {"dtype": "bfloat16"}, "vision_config": {}}


def test_engines_start_from_the_model_in_bfloat16(stored, tmp_path):
    folder, _, _ = stored
    (folder / "tokenizer.json").write_text("{}")
    run = RunFolder(tmp_path / "run")

    def experiment(path, **rollout):
        sections = {"name": "t", "output_dir": str(run.path), "model": {"path": str(path)}, "data": {"path": "d"}}
        return ExperimentConfig.model_validate(sections | {"rollout": rollout})

    seen = as_engines_see_it(experiment(folder), run)
    assert seen.model.path == str(run.engine_model) and seen.model.tokenizer == str(folder)
    assert json.loads((run.engine_model / "config.json").read_text()) == {"model_type": "toy", "dtype": "bfloat16"}
    assert {file.name for file in run.engine_model.iterdir()} == {"config.json", "tokenizer.json"}
    assert as_engines_see_it(seen, run) is seen, "a model that is not quantized is started from its own folder"


@pytest.mark.parametrize(
    ("overrides", "quantization", "reason"),
    [([], INT4, "pack-quantized weights"), (["rollout.load_format=model"], FP8, "rollout.load_format = model, but")],
)
def test_check_says_so_in_one_message(overrides, quantization, reason):
    config = load_config(ROOT / "configs" / "qwen3_235b_math.yaml", overrides)
    (problem,) = check_against_model(config, qwen() | {"quantization_config": quantization})
    assert reason in problem
