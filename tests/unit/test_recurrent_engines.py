"""Engines of models with recurrent layers: their settings, their memory, and kernels stood in on a CPU."""

import json
from pathlib import Path

import pytest
import torch

from megagrpo.check.rules.engine_layout import server_of
from megagrpo.config.schema import ExperimentConfig
from megagrpo.cpu.engine import gated_delta
from megagrpo.models.folder import Model
from megagrpo.models.table import read_description
from megagrpo.rollout.service.engine_command import ServerPlace, engine_environment, engine_settings
from megagrpo.rollout.service.engine_model import as_engines_see_it
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.plan.engine_memory import assumed_lengths, engine_side
from megagrpo.tools.plan.hardware import hardware_of
from megagrpo.tools.plan.work import model_work
from tests.experiments import ROOT, engine_layout_problems, experiment

MODEL = ROOT / "configs" / "models" / "Qwen3.5-397B-A17B"
HEADS, KEYS, K, V, TAPS = 4, 2, 3, 5, 4


def config(**rollout) -> ExperimentConfig:
    return experiment(model={"path": str(MODEL)}, rollout=rollout)


def place(cuda: bool) -> ServerPlace:
    return ServerPlace(0, "127.0.0.1", 20001, "10.0.0.1:20002", cuda, 8)


@pytest.mark.parametrize(
    ("cuda", "sglang", "states"), [(True, {}, 5), (False, {}, 3), (True, {"disable_radix_cache": True}, 1)]
)
def test_states_are_bounded_by_the_requests_that_run(cuda, sglang, states):
    of = config(max_running_requests=20, dtype="float32", sglang=sglang)
    settings = engine_settings(of, place(cuda))
    assert settings["max_mamba_cache_size"] == 20 * states
    assert ("disable_overlap_schedule" in settings) != cuda
    assert engine_environment(of, place(cuda))["SGLANG_MAMBA_CONV_DTYPE"] == "float32"


def test_other_models_have_none_of_it(tmp_path):
    of = experiment(model={"path": str(tmp_path)})
    assert "max_mamba_cache_size" not in engine_settings(of, place(False))
    assert "SGLANG_MAMBA_CONV_DTYPE" not in engine_environment(of, place(False))


def test_engines_are_told_to_leave_a_tower_out(tmp_path):
    seen = as_engines_see_it(config(load_format="dummy"), RunFolder(tmp_path))
    given = read_description(MODEL / "config.json")
    found = read_description(Path(seen.model.path) / "config.json")
    assert found.pop("language_model_only") is True
    assert json.dumps(found) == json.dumps(given) and seen.model.tokenizer == str(MODEL)


def test_states_and_keys_of_the_397b_are_counted():
    """45 layers with a state of 64 x 128 x 128 float32 and 3 inputs of 12,288 channels; 15 with two
    key/value heads of 256, each on a rank of its own or repeated."""
    work = model_work(Model.read(MODEL).arch)
    assert work.state_bytes(1) == 45 * (64 * 128 * 128 * 4 + 12288 * 3 * 2)
    assert work.state_bytes(16) * 16 == work.state_bytes(1)
    assert work.cache_bytes(16) == 15 * 2 * 256 * 2
    of = config(tp=16, ep=16, dtype="bfloat16", max_running_requests=128, mem_fraction=0.85)
    side = engine_side(work, server_of(of.rollout), assumed_lengths(of), 4096, hardware_of("H100"))
    assert side.parts["recurrent states"] == (5 * 128 + 1) * work.state_bytes(16)
    assert side.problems == () and side.concurrent == 128
    weights = work.dense + work.expert + 2 * work.vocabulary
    assert side.parts["weights"] == pytest.approx(weights * 2 / 16, rel=0.02)
    many = of.rollout.model_copy(update={"max_running_requests": 2000})
    side = engine_side(work, server_of(many), assumed_lengths(of), 4096, hardware_of("H100"))
    assert any("and recurrent states 120.1 GB" in problem for problem in side.problems)


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"tp": 32}, "tp = 32 does not divide the model's linear_num_key_heads = 16"),
        (
            {"tp": 16, "sglang": {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}},
            "enable_hierarchical_cache with recurrent layers is refused",
        ),
    ],
)
def test_refused(rollout, said):
    (problem,) = engine_layout_problems(config(**rollout).rollout, Model.read(MODEL).arch)
    assert said in problem


def inputs(tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "q": draw(1, tokens, KEYS, K),
        "k": draw(1, tokens, KEYS, K),
        "v": draw(1, tokens, HEADS, V),
        "g": -draw(1, tokens, HEADS).abs(),
        "beta": draw(1, tokens, HEADS).sigmoid(),
    }


def read(of: dict[str, torch.Tensor], states: torch.Tensor, bounds: list[int], slots: list[int]):
    out, _, _ = gated_delta.chunk_gated_delta_rule_cpu(
        **of, initial_state=states, cu_seqlens=torch.tensor(bounds), head_first=False,
        use_qk_l2norm_in_kernel=True, initial_state_indices=torch.tensor(slots),
    )  # fmt: skip
    return out


def test_the_delta_rule_is_the_published_one():
    """Equation 10 of arXiv:2412.06464 for one head, as matrices."""
    of, states = inputs(6), torch.zeros(1, HEADS, V, K)
    out = read(of, states, [0, 6], [0])
    unit = torch.nn.functional.normalize
    for head in range(HEADS):
        state = torch.zeros(V, K)
        for t in range(6):
            q, k = (unit(of[name][0, t, head // 2], dim=0) for name in "qk")
            v, beta = of["v"][0, t, head], of["beta"][0, t, head]
            state = state * of["g"][0, t, head].exp() @ (torch.eye(K) - beta * torch.outer(k, k))
            state = state + beta * torch.outer(v, k)
            assert torch.allclose(out[0, t, head], state @ q * K**-0.5, atol=1e-5)
        assert torch.allclose(states[0, head], state, atol=1e-5)


def test_kimi_delta_attention_is_the_published_one_and_goes_on_by_a_token():
    """Equation 1 of arXiv:2510.26692 for one head, as matrices; decays are of each channel of the keys."""
    draw = torch.Generator().manual_seed(0)
    q, k, g = (torch.randn(1, 6, HEADS, K, generator=draw) for _ in range(3))
    v, raw = torch.randn(1, 6, HEADS, V, generator=draw), torch.randn(1, 6, HEADS, generator=draw)
    a_log, dt_bias = torch.randn(1, 1, HEADS, 1, generator=draw), torch.randn(HEADS * K, generator=draw)
    common = {"A_log": a_log, "dt_bias": dt_bias, "lower_bound": None, "use_qk_l2norm_in_kernel": True}
    states, slots = torch.zeros(1, HEADS, V, K), torch.tensor([0])
    out = gated_delta.chunk_kda(
        *(t[:, :5] for t in (q, k, v, g, raw.sigmoid())), **common, initial_state=states, initial_state_indices=slots,
        cu_seqlens=torch.tensor([0, 5]), beta_is_raw=False, output_intermediate_states=False,
    )  # fmt: skip
    last = gated_delta.kda_update(
        **common, q=q[:, 5:], k=k[:, 5:], v=v[:, 5:], a=g[0, 5:].flatten(1), b=raw[:, 5:], is_kda=True,
        initial_state_source=states, initial_state_indices=slots,
    )  # fmt: skip
    out, unit = torch.cat((out, last), 1), torch.nn.functional.normalize
    decay = -a_log[0].exp() * torch.nn.functional.softplus(g[0] + dt_bias.view(HEADS, K))
    for head in range(HEADS):
        state = torch.zeros(V, K)
        for t in range(6):
            one_q, one_k = (unit(x[0, t, head], dim=0) for x in (q, k))
            beta = raw[0, t, head].sigmoid()
            state = state * decay[t, head].exp() @ (torch.eye(K) - beta * torch.outer(one_k, one_k))
            state = state + beta * torch.outer(v[0, t, head], one_k)
            assert torch.allclose(out[0, t, head], state @ one_q * K**-0.5, atol=1e-5)
        assert torch.allclose(states[0, head], state, atol=1e-5)


def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_in_pieces():
    of, bounds = inputs(12), [0, 3, 10, 12]
    together = torch.zeros(4, HEADS, V, K)
    out = read(of, together, bounds, [2, 0, -1])  # the last one pads the batch
    assert not together[1].any() and not together[3].any(), "slots of others"
    alone = torch.zeros(4, HEADS, V, K)
    for start, stop in ((3, 7), (7, 10)):
        piece = read({name: x[:, start:stop] for name, x in of.items()}, alone, [0, stop - start], [0])
        assert torch.equal(piece, out[:, start:stop])
    assert torch.equal(alone[0], together[0])


def test_a_token_more_is_what_a_longer_sequence_has():
    """Convolution and rule; a slot's earlier request, here NaN, leaves nothing."""
    generator = torch.Generator().manual_seed(3)
    dim = HEADS * V
    x, weight = (torch.randn(shape, generator=generator) for shape in ((dim, 8), (dim, TAPS)))
    args = {"bias": None, "activation": "silu"}
    states = torch.full((2, dim, TAPS - 1), torch.nan)

    def convolve(x, goes_on):
        return gated_delta.causal_conv1d_fn_cpu(
            x, weight, **args, conv_states=states, has_initial_state=torch.tensor([goes_on]),
            cache_indices=torch.tensor([1]), query_start_loc=torch.tensor([0, x.shape[1]]),
            seq_lens_cpu=None,
        )  # fmt: skip

    whole = convolve(x, False)
    padded = torch.nn.functional.pad(x, (TAPS - 1, 0))
    expected = torch.nn.functional.conv1d(padded[None], weight[:, None], groups=dim)[0]
    assert torch.allclose(whole, torch.nn.functional.silu(expected), atol=1e-5)
    last = states[1].clone()
    pieces = [convolve(x[:, :2], False), convolve(x[:, 2:7], True)]
    more = gated_delta.causal_conv1d_update_cpu(
        x[:, 7][None], states, weight, **args, conv_state_indices=torch.tensor([1])
    )
    assert torch.allclose(torch.cat([*pieces, more.t()], 1), whole, atol=1e-6)
    assert torch.equal(states[1], last) and states[0].isnan().all()
