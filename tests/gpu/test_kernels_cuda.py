"""On one GPU: variable-length attention, digests, group statistics, against the CPU or plain torch."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from megagrpo.algo.statistics import alone, group_statistics
from megagrpo.mesh import make_mesh
from megagrpo.weights.copies.recorder import Copy
from megagrpo.weights.copies.views import Box
from megagrpo.weights.digests import digest
from megagrpo.weights.digests.digest import batched_digest
from megagrpo.weights.expected_digests import ExpectedDigests
from megagrpo.weights.transports.protocol import TrainerWeights
from megagrpo.weights.wire.engine_group import GroupLimits

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dim, width", [(64, 64), (128, 128), (192, 128)])  # of values: latent attention's are narrower
@pytest.mark.parametrize("heads, groups", [(8, 8), (8, 2), (4, 1)])
def test_packed_attention_in_bfloat16(dim, width, heads, groups):
    """Forward and gradients of every sequence against float32 attention over that sequence alone."""
    from megagrpo.actor.host import prepare_host

    prepare_host()
    from megagrpo.models.kinds.grouped_query.layer import CausalAttention

    attention = CausalAttention(SimpleNamespace(kv_channels=dim, context_parallel_size=1), 1, None, "self")
    lengths = [1, 7, 130, 64, 33]
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(sum(lengths), n, size, generator=generator).to(CUDA, torch.bfloat16)
        for n, size in ((heads, dim), (groups, dim), (groups, width))
    ]
    weight = torch.randn(sum(lengths), heads * width, generator=generator).to(CUDA)
    cu = torch.tensor([0, *lengths], device=CUDA).cumsum(0).int()
    packed = [p.clone().requires_grad_() for p in parts]
    out = attention(*packed, None, packed_seq_params=SimpleNamespace(cu_seqlens_q=cu, max_seqlen_q=max(lengths)))
    (out.float() * weight).sum().backward()
    exact = [p.float().requires_grad_() for p in parts]
    rows = []
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        q, k, v = (t[start:end].transpose(0, 1) for t in exact)
        k, v = (t.repeat_interleave(heads // groups, 0) for t in (k, v))
        future = torch.ones(end - start, end - start, dtype=torch.bool, device=CUDA).triu(1)
        scores = (q @ k.transpose(1, 2) * dim**-0.5).masked_fill(future, -torch.inf)
        rows.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    expected = torch.cat(rows)
    (expected * weight).sum().backward()
    for mine, truth in [(out, expected), *((p.grad, e.grad) for p, e in zip(packed, exact, strict=True))]:
        assert float((mine.float() - truth).norm() / truth.norm()) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
def test_digest_has_the_same_bits(dtype, fused, monkeypatch):
    """The fused kernel, and plain torch in its place: batches of vectors, matrices and transposed ones, and 3-D."""
    if fused:
        assert digest._has_triton(), "torch for CUDA brings Triton"
    else:
        monkeypatch.setattr(digest, "_has_triton", lambda: False)
    draw = torch.Generator().manual_seed(0)
    for size in [(1500, 1000), (768, 2048), (8192, 96), (4096,), (151_936,), (1,), (3, 50, 70), ()]:
        values = torch.randn(5, *size, generator=draw).to(dtype)
        box = Box((3,) * len(size), size)
        expected = batched_digest(values, box)
        layouts = [values.to(CUDA)]
        if len(size) > 1:
            layouts.append(layouts[0].mT.contiguous().mT)
        for layout in layouts:
            assert torch.equal(batched_digest(layout, box).cpu(), expected), (size, layout.stride())
            assert torch.equal(batched_digest(layout[1::3], box).cpu(), expected[1::3]), (size, layout.stride())


def test_digests_in_a_side_thread_have_the_same_bits(tmp_path):
    """As ExpectedDigests runs them while the transfer goes on: in a thread and a stream of their own."""
    values = torch.randn(6, 700, 300, generator=torch.Generator().manual_seed(0))
    specs = {str(k): ((700, 300), torch.bfloat16) for k in range(6)}
    copies = [Copy(str(k), (0, 0), (700, 300), "experts", k * 210_000, (300, 1)) for k in range(6)]
    mesh = make_mesh(0, 1, torch.device("cuda", 0), deadline_s=30)
    live = {"experts": values.to(CUDA)}
    expected = ExpectedDigests(
        TrainerWeights(
            mesh, specs, [copies], lambda: live, torch.bfloat16, 1 << 20, 1, tmp_path, tmp_path, GroupLimits(60)
        )
    )
    expected.add([copies])
    with ThreadPoolExecutor(1) as pool:
        found = expected.total(pool.submit(expected.local).result())
    assert found.tolist() == batched_digest(values.to(torch.bfloat16), Box((0, 0), (700, 300))).tolist()


def test_group_statistics_have_the_same_bits():
    generator = torch.Generator().manual_seed(0)
    rewards = 1000 + torch.randint(0, 4, (4096,), generator=generator).double() / 10
    groups = torch.arange(4096)[torch.randperm(4096, generator=generator)] // 8
    valid = torch.rand(4096, generator=generator) < 0.9

    def on(device: torch.device):
        return group_statistics(rewards.to(device), groups.to(device), 512, valid.to(device), alone)

    mine, theirs = on(CUDA), on(torch.device("cpu"))
    for name, value in vars(theirs).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(mine, name).cpu(), value), name
