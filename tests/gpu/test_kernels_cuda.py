"""On one GPU: variable-length attention, chunked head, digests, group statistics, against the CPU or plain torch."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megagrpo.algo.statistics import alone, group_statistics
from megagrpo.weights.digest import slice_digest
from megagrpo.weights.views import Box

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads, groups", [(8, 8), (8, 2), (4, 1)])
def test_packed_attention_in_bfloat16(dim, heads, groups):
    """Forward and gradients of every sequence against float32 attention over that sequence alone."""
    from megagrpo.actor.host import prepare_host

    prepare_host()
    from megagrpo.actor.attention import CausalAttention

    attention = CausalAttention(SimpleNamespace(kv_channels=dim, context_parallel_size=1), 1, None, "self")
    lengths = [1, 7, 130, 64, 33]
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(sum(lengths), n, dim, generator=generator).to(CUDA, torch.bfloat16) for n in (heads, groups, groups)
    ]
    weight = torch.randn(sum(lengths), heads * dim, generator=generator).to(CUDA)
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


@pytest.mark.parametrize("dtype, bound, memory", [("float32", 1e-5, 1 / 8), ("bfloat16", 2e-2, 3 / 8)])
def test_chunked_head(dtype, bound, memory, tmp_path):
    """bench/head.py at its whole size: values, gradients and memory against materialised logits.

    In bfloat16 the weight's gradient is summed in float32, here a fourth of two matrices of logits, and then rounded.
    """
    command = [
        sys.executable,
        str(ROOT / "bench" / "head.py"),
        "--device",
        "cuda",
        "--dtype",
        dtype,
        "--folder",
        str(tmp_path),
    ]
    row = json.loads(subprocess.run([*command, "--rounds", "1"], check=True, capture_output=True, text=True).stdout)
    assert row["memory_over_two_matrices"] <= memory, row
    assert all(value <= bound for name, value in row.items() if name.endswith("_difference")), row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_has_the_same_bits(dtype):
    values = torch.randn(1500, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    box = Box((3, 0), (1500, 1000))
    assert int(slice_digest(values.to(CUDA), box)) == int(slice_digest(values, box))


def test_group_statistics_have_the_same_bits():
    generator = torch.Generator().manual_seed(0)
    rewards = 1000 + torch.randint(0, 4, (4096,), generator=generator).double() / 10
    groups = torch.arange(4096)[torch.randperm(4096, generator=generator)] // 8
    valid = torch.rand(4096, generator=generator) < 0.9

    def on(device: torch.device):
        return group_statistics(rewards.to(device), groups.to(device), 512, valid.to(device), alone, 1)

    mine, theirs = on(CUDA), on(torch.device("cpu"))
    for name, value in vars(theirs).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(mine, name).cpu(), value), name
