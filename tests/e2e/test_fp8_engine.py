"""SGLang's own model in FP8 on a CPU: what it holds after a publish, and that it computes with it."""

import json

import pytest

from megagrpo.cpu.engine_settings import FOLDER
from megagrpo.models.table import FAMILIES
from megagrpo.system.environment import child_environment
from tests.experiments import ROOT, python

OTHERS = sorted(name for name, family in FAMILIES.items() if name != "qwen3_moe" and not family.FP8_REFUSAL)


@pytest.mark.verifies(
    "weights",
    "FP8: each byte is what the engine's loader makes of an independent quantizer's checkpoint",
    "unit/test_fp8.py",
    "dist/test_fp8_engines.py",
)
@pytest.mark.parametrize("family", ["qwen3_moe", *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)])
def test_a_publish_gives_what_sglang_makes_of_a_quantized_checkpoint(tmp_path, family):
    """The checkpoint is an independent quantizer's. A layer that the engine exempts stops the run by its name.

    The attention of SGLang's Mixtral, Llama, Qwen2 and DeepSeek-V3 has scales of its cache, which no tensor fills.
    """
    variables = {"PYTHONPATH": f"{FOLDER}:{ROOT}", "SGLANG_USE_CPU_ENGINE": "1"}
    words = ("-m", "tests.e2e.fp8_in_process", tmp_path, family)
    found = json.loads(python(*words, env=child_environment() | variables, cwd=ROOT).splitlines()[-1])
    assert found["reshard"] == found["disk"] == [], "every parameter and scale, bit for bit"
    # negated weights have the same scales and norms of their own
    assert min(found["reshard, others"], found["disk, others"]) > found["parameters"] / 3
    assert found["reshard, bytes"] == found["bytes"], "the lower bound: each byte of the engine once"
    if family == "qwen3_moe":  # SGLang's Mixtral does not give its layers the names by which they are exempted
        assert 0 < max(found["outputs"].values()) < 0.06, "activations are rounded to E4M3"
        assert "parameter model.layers.1.self_attn.o_proj.weight is in torch.bfloat16" in found["exempted"]
