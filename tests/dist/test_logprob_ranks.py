"""Vocabulary-parallel log-probabilities over two gloo ranks give what one rank gives, gradients included."""

from pathlib import Path

import torch

from megagrpo.algo.logprob import VocabularyShard, chunked_full_kl, chunked_logprobs
from megagrpo.mesh import Mesh
from tests.dist.bounds import close, within
from tests.dist.workers.launch import run_meshes

WORLD, TOKENS, HIDDEN, VOCAB, PADDED = (2, 23, 8, 37, 48)  # the second rank's last 11 columns are padding


def problem() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(PADDED, HIDDEN)
    weight[VOCAB:] = 100.0  # padding that would win every softmax
    targets = torch.randint(0, VOCAB, (TOKENS,))
    return hidden, weight, targets, torch.randn(TOKENS), torch.randn(TOKENS)


def solve(start: int, stop: int, reduce) -> dict[str, torch.Tensor]:
    hidden, weight, targets, a, b = problem()
    hidden.requires_grad_()
    local = weight[start:stop].clone().requires_grad_()
    shard = VocabularyShard(VOCAB, start, reduce)
    logprobs, entropy = chunked_logprobs(hidden, local, targets, 0.7, 5, shard)
    reference = (hidden.detach().flip(0), weight[start:stop].flip(1))
    kl = chunked_full_kl(hidden, local, *reference, 0.7, 5, shard)
    (logprobs @ a + entropy @ b + kl @ a).backward()
    out = {"logprobs": logprobs, "entropy": entropy, "kl": kl, "hidden": hidden.grad, "weight": local.grad}
    return {name: value.detach() for name, value in out.items()}


def of_rank(mesh: Mesh) -> dict[str, torch.Tensor]:
    half = PADDED // WORLD
    return solve(mesh.rank * half, (mesh.rank + 1) * half, mesh.reduce)


def test_two_ranks_equal_one(tmp_path: Path):
    ranks, one = run_meshes(WORLD, tmp_path, of_rank), solve(0, PADDED, None)
    for name in ("logprobs", "entropy", "kl"):
        for rank in ranks:
            assert close(name, rank[name], one[name], rtol=1e-5, atol=1e-5)
    # the caller sums the partial gradients of hidden; each rank holds the whole gradient of its own columns
    summed = ranks[0]["hidden"] + ranks[1]["hidden"]
    weight = torch.cat([r["weight"] for r in ranks])
    for name, gradient in {"hidden": summed, "weight": weight}.items():
        ratio = float((gradient - one[name]).abs().max() / one[name].abs().max())
        assert within(f"gradient of {name}", ratio, 1e-5)
    assert (one["weight"][VOCAB:] == 0).all()
