"""SGLang's kernels of Mamba-2 stood in on a CPU: the published recurrence, the same bits in any batch."""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F

from megagrpo.cpu.engine import mamba2

HEADS, GROUPS, WIDTH, STATE = 4, 2, 5, 3


def inputs(tokens: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    return {
        "x": normal(1, tokens, HEADS, WIDTH), "dt": normal(1, tokens, HEADS), "A": -normal(HEADS).exp(),
        "B": normal(1, tokens, GROUPS, STATE), "C": normal(1, tokens, GROUPS, STATE), "D": normal(HEADS),
        "dt_bias": normal(HEADS),
    }  # fmt: skip


def scanned(values: dict[str, Tensor], bounds: list[int], initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(values["x"])
    settings = {"state_dtype": torch.float32, "chunk_size": 8, "return_varlen_states": True}
    _, states, _ = mamba2.mamba_chunk_scan_combined(
        **values, cu_seqlens=torch.tensor(bounds), initial_states=initial, out=out, **settings
    )
    return out, states


def piece(values: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: t[:, start:stop] if t.dim() > 1 else t for name, t in values.items()}


def test_the_scan_is_the_published_one():
    """Of arXiv 2405.21060 for one head, as matrices."""
    values = inputs(6)
    out, states = scanned(values, [0, 6])
    for head in range(HEADS):
        state, group = torch.zeros(WIDTH, STATE), head // (HEADS // GROUPS)
        for t in range(6):
            x = values["x"][0, t, head]
            step = F.softplus(values["dt"][0, t, head] + values["dt_bias"][head])
            state = state * (step * values["A"][head]).exp() + torch.outer(step * x, values["B"][0, t, group])
            expected = state @ values["C"][0, t, group] + values["D"][head] * x
            assert torch.allclose(out[0, t, head], expected, atol=1e-5)
        assert torch.allclose(states[0, head], state, atol=1e-5)


def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_in_pieces():
    values = inputs(12)
    out, together = scanned(values, [0, 3, 10, 12])
    state = None
    for start, stop in ((3, 7), (7, 10)):
        alone, state = scanned(piece(values, start, stop), [0, stop - start], state)
        assert torch.equal(alone, out[:, start:stop])
    assert state is not None and torch.equal(state[0], together[1])


def test_a_token_more_is_what_a_longer_sequence_has():
    """In a slot of its own; arguments are repeated for a head's elements, as SGLang repeats them."""
    values = inputs(4)
    out, states = scanned(values, [0, 4])
    pool = torch.full((3, HEADS, WIDTH, STATE), torch.nan)
    pool[1] = scanned(piece(values, 0, 3), [0, 3])[1][0]
    last = {name: t[0, 3:] for name, t in values.items() if t.dim() > 1}
    found = torch.empty(1, HEADS, WIDTH)
    wide = {name: values[name][:, None].expand(-1, WIDTH) for name in ("D", "dt_bias")}
    mamba2.selective_state_update(
        pool, last["x"], last["dt"][..., None].expand(-1, -1, WIDTH),
        values["A"][:, None, None].expand(-1, WIDTH, STATE), last["B"], last["C"], wide["D"], z=None,
        dt_bias=wide["dt_bias"], dt_softplus=True, state_batch_indices=torch.tensor([1]), out=found,
    )  # fmt: skip
    assert torch.equal(found[0], out[0, 3]) and torch.equal(pool[1], states[0])
    assert pool[[0, 2]].isnan().all(), "slots of others"


def test_experts_are_squared_and_scaled_and_others_are_left_out():
    module = SimpleNamespace(moe_forward_native=lambda *_: "gated")
    mamba2.squared_relu_experts(module)
    draw = torch.Generator().manual_seed(1)
    layer = SimpleNamespace(
        w13_weight=torch.randn(3, 6, 4, generator=draw), w2_weight=torch.randn(3, 4, 6, generator=draw)
    )
    x, ids = torch.randn(2, 4, generator=draw), torch.tensor([[2, 0], [1, -1]])
    chosen = SimpleNamespace(topk_ids=ids, topk_weights=torch.rand(2, 2, generator=draw))
    config = SimpleNamespace(activation="relu2", routed_scaling_factor=2.5)
    found = module.moe_forward_native(layer, x, chosen, config)
    for token in range(2):
        pairs = zip(ids[token].tolist(), chosen.topk_weights[token], strict=True)
        terms = [w * (layer.w2_weight[e] @ (layer.w13_weight[e] @ x[token]).relu() ** 2) for e, w in pairs if e >= 0]
        assert torch.allclose(found[token], 2.5 * sum(terms), atol=1e-5)
    config.activation = "silu"
    assert module.moe_forward_native(layer, x, chosen, config) == "gated"
