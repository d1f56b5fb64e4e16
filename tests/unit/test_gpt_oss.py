"""gpt-oss: sinks, windows, the clamped activation and MXFP4, each against its equation or transformers' function."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from examples.laptop.recipe import TinyModelConfig
from megagrpo.actor.host import prepare_host
from megagrpo.check.problems import layout_problems
from megagrpo.config.actor import ActorConfig, ParallelConfig
from megagrpo.models.costs import Share
from megagrpo.models.table import architecture_of, model_problems, parameter_counts, training_flops
from megagrpo.system.torchvision import prepare_torchvision
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.weights.hf_folder import HfFolder

prepare_host("cpu")

from megatron.core import parallel_state as mpu  # noqa: E402  Megatron needs a prepared host
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402  Megatron needs a prepared host

from megagrpo.models.kinds.clamped.layer import ClampedSwiglu  # noqa: E402  likewise
from megagrpo.models.kinds.grouped_query.layer import CausalAttention, PackedSequences  # noqa: E402  likewise

TINY = hf_config(TinyModelConfig(path="x", family="gpt_oss"))
YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
    "truncate": False,
}  # fmt: skip
SMALL = {  # as published, see docs/evidence/families.md
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 150000, "rope_scaling": YARN, "attention_bias": True,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128,
    "swiglu_limit": 7.0, "hidden_act": "silu", "tie_word_embeddings": False, "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
LARGE = SMALL | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": SMALL["layer_types"][:2] * 18}
LENGTHS, HEADS, GROUPS, DIM, WINDOW = (9, 1, 14), 4, 2, 8, 5


def attention(layer: int) -> CausalAttention:
    """Layer 1 has a window, layer 2 sees all."""
    config = SimpleNamespace(
        kv_channels=DIM, context_parallel_size=1, tensor_model_parallel_size=1, num_attention_heads=HEADS,
        window_size=(WINDOW - 1, 0), window_attn_skip_freq=[1, 0], softmax_type="learnable", params_dtype=torch.float64,
    )  # fmt: skip
    module = CausalAttention(config, layer, None, "self")
    with torch.no_grad():
        module.softmax_offset.copy_(torch.linspace(-1.0, 2.0, HEADS))
    return module


def by_query(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """Query by query: exp(s_j) / (exp(sink) + sum exp(s)) over the keys that it sees."""
    rows = []
    for t in range(len(query)):
        first = 0 if window is None else max(0, t - window + 1)
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            scores = (key[first : t + 1, group] @ query[t, head] * DIM**-0.5).exp()
            rows.append((scores / (scores.sum() + sinks[head].exp())) @ value[first : t + 1, group])
    return torch.stack(rows).view(len(query), HEADS * DIM)


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.verifies("actor", "gpt-oss: sinks, windows and the clamped activation are their equations, in float64")
def test_sinks_and_windows_are_their_equation(layer, packed, monkeypatch):
    """Values and gradients, packed and padded."""
    monkeypatch.setattr(mpu, "get_context_parallel_world_size", lambda: 1)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    monkeypatch.setattr(mpu, "get_context_parallel_group", lambda: alone)
    draw = torch.Generator().manual_seed(0)
    parts = [
        [torch.randn(n, heads, DIM, generator=draw, dtype=torch.float64) for n in LENGTHS]
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    flat = [torch.cat(of_kind).requires_grad_() for of_kind in parts]
    module = attention(layer)
    if packed:
        bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
        found = module(*flat, None, packed_seq_params=PackedSequences.make(bounds, LENGTHS, 1))
    else:
        padded = [torch.nn.utils.rnn.pad_sequence(t.split(LENGTHS)) for t in flat]
        rows = module(*padded, None).transpose(0, 1)
        found = torch.cat([row[:n] for row, n in zip(rows, LENGTHS, strict=True)])
    sinks = module.softmax_offset.detach().clone().requires_grad_()
    exact = [t.detach().clone().requires_grad_() for t in flat]
    window = WINDOW if layer == 1 else None
    pieces = zip(*(t.split(LENGTHS) for t in exact), strict=True)
    expected = torch.cat([by_query(*piece, sinks, window) for piece in pieces])
    assert torch.allclose(found, expected, rtol=1e-12)
    weights = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip((*flat, module.softmax_offset), (*exact, sinks), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-10)


def test_the_activation_is_transformers_and_its_clamps_have_no_gradient():
    prepare_torchvision()
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    both = torch.tensor([[-9.0, 8.0, 9.0, -8.0, 2.0, 0.5, 7.5, 1.0]], dtype=torch.float64, requires_grad=True)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, activation_func_clamp_value=7.0)
    found = ClampedSwiglu(config)(both)
    own = SimpleNamespace(alpha=1.702, limit=7.0)
    assert torch.allclose(found, GptOssExperts._apply_gate(own, both), rtol=1e-14)
    found.sum().backward()
    assert both.grad[0, [1, 2, 3, 6]].tolist() == [0.0] * 4 and both.grad[0, [0, 4, 5, 7]].all()


def test_mxfp4_is_read_as_transformers_does(tmp_path):
    """Whole, and boxes that begin and end within blocks of 32 inputs."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 2), generator=draw, dtype=torch.uint8)
    save_file({"a.gate_blocks": blocks, "a.gate_scales": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    folder, expected = HfFolder(tmp_path), convert_moe_packed_tensors(blocks, scales)
    assert folder.specs == {"a.gate": ((3, 64, 10), torch.bfloat16)}
    assert torch.equal(folder["a.gate"], expected) and folder.fingerprint()
    for start, size in (((1, 0, 0), (1, 64, 10)), ((0, 5, 3), (2, 50, 4)), ((2, 33, 9), (1, 31, 1))):
        box = torch.empty(size, dtype=torch.bfloat16)
        folder.read_into(box, "a.gate", start)
        whole = expected[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        assert torch.equal(box, whole)
    save_file({"a.gate_blocks": blocks}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="a.gate_blocks .* needs blocks of 16 bytes and a scale for each"):
        HfFolder(tmp_path)


def test_published_models_have_the_parameters_that_their_card_counts():
    """20.9 and 116.8 billion, 3.6 and 5.1 active with the input embedding."""
    for hf, total, active in ((SMALL, 20.9, 3.6), (LARGE, 116.8, 5.1)):
        counts = parameter_counts(architecture_of(hf))
        embedding = hf["vocab_size"] * hf["hidden_size"]
        assert (round(counts.total / 1e9, 1), round(counts.active / 1e9, 1)) == (total, active), embedding


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types must name"),
        ({"sliding_window": None}, "sliding_window None must be a number"),
        ({"attention_bias": False}, "attention_bias False"),
        ({"hidden_act_alpha": 1.0}, "hidden_act_alpha 1.0"),
        ({"rope_scaling": YARN | {"mscale": 1.0}}, "'yarn' with mscale is not supported"),
        ({"rope_scaling": {k: v for k, v in YARN.items() if k != "factor"}}, "lacks factor"),
        ({"swiglu_limit": None}, "lacks swiglu_limit"),
        ({"rope_scaling": None}, "take YaRN with factor 32; write that"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(change, said):
    assert model_problems(TINY) == model_problems(SMALL) == []
    changed = {k: v for k, v in (TINY | change).items() if k != "swiglu_limit" or v is not None}
    (problem,) = model_problems(changed)
    assert said in problem


def test_a_window_costs_what_its_keys_cost():
    """Half of the layers see 8 keys; attention's products are counted for the keys that are seen."""
    arch = architecture_of(TINY)
    cost = arch.attention.cost(Share(arch.hidden_size, ParallelConfig(), 100.0, 100.0, 4))
    assert cost.pair_flops == 0 and cost.chosen_flops == 4 * arch.attention.heads * arch.attention.head_dim
    assert arch.attention.most_keys == 8 and arch.attention.limited_share == 0.5


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        ({"world_size": 2, "parallel": {"tp": 2, "etp": 2}}, "actor.parallel.etp = 2"),
        ({"dtype": "bfloat16", "transformer_engine": False}, "only Transformer Engine has a kernel"),
        ({"world_size": 2, "dtype": "bfloat16", "parallel": {"cp": 2}}, "that share a sequence"),
        ({"lora": {"rank": 4}}, "actor.lora is not supported with a gpt_oss model"),
        # Megatron would compute silu(gate) up of halves, which are not halves here
        ({"megatron": {"use_te_activation_func": False}}, "layers of a gpt_oss model are computed with True"),
    ],
)
def test_layouts_that_would_be_wrong_are_refused(actor, said):
    arch = architecture_of(TINY)
    for right in ({"world_size": 2, "parallel": {"cp": 2}}, {"megatron": {"moe_router_dtype": "fp64"}}):
        assert layout_problems(arch, ActorConfig(**right)) == []
    (problem,) = layout_problems(arch, ActorConfig(**actor))
    assert said in problem


def test_training_flops_of_layers_with_windows_do_not_grow_with_the_square_of_a_sequence():
    arch = architecture_of(SMALL)
    once, twice = (training_flops(arch, [length], False) for length in (10_000, 20_000))
    grown = (twice - 2 * once) / (3 * 10_000**2 * arch.attention.pair_flops)
    assert grown == pytest.approx(12, rel=0.01), "half of 24 layers see everything"
