"""Chunked log-probabilities, entropy and full KL against plain autograd over whole logits."""

import pytest
import torch

from megagrpo.algo import logprob
from megagrpo.algo.logprob import VocabularyShard, chunked_draft_kl, chunked_full_kl, chunked_logprobs

TOKENS, HIDDEN, VOCAB, PADDED = 21, 8, 29, 32
REAL = VocabularyShard(size=VOCAB)


@pytest.fixture
def problem():
    torch.manual_seed(0)
    hidden, weight = (torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randn(PADDED, HIDDEN, requires_grad=True))
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,))


def plain(hidden, weight, targets, temperature):
    logp = ((hidden @ weight[:VOCAB].T) / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)


def gradients(value, *inputs):
    return torch.autograd.grad(value, inputs)


@pytest.mark.parametrize("tile", [5, 8192])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)])
def test_values_and_gradients(problem, monkeypatch, tile, chunk, a, b):
    monkeypatch.setattr(logprob, "TILE_COLUMNS", tile)
    hidden, weight, targets = problem
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, 0.7, chunk, REAL)
    right_logprobs, right_entropy = plain(hidden, weight, targets, 0.7)
    torch.testing.assert_close((logprobs, entropy), (right_logprobs, right_entropy), rtol=1e-5, atol=1e-5)
    # the sums of squared probabilities, as the head computes them
    squares = (2 * logprobs - chunked_logprobs(hidden, weight, targets, 0.35, chunk, REAL)[0]).exp()
    right = ((hidden @ weight[:VOCAB].T) / 0.7).softmax(-1).square().sum(-1)
    torch.testing.assert_close(squares, right, rtol=1e-5, atol=1e-7)
    coefficients = torch.randn(TOKENS)
    used = a * logprobs + b * entropy if b else a * logprobs  # only the log-probabilities may be used
    mine = gradients(used @ coefficients, hidden, weight)
    right = gradients((a * right_logprobs + b * right_entropy) @ coefficients, hidden, weight)
    torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    assert (mine[1][VOCAB:] == 0).all()


@pytest.mark.parametrize("tile", [5, 8192])
def test_several_targets_of_a_position(problem, monkeypatch, tile):
    """A target twice; the first alone has the bits of a call with one."""
    monkeypatch.setattr(logprob, "TILE_COLUMNS", tile)
    hidden, weight, targets = problem
    more = torch.randint(0, VOCAB, (TOKENS, 3))
    more[:, 0], more[3, 1] = targets, targets[3]
    logprobs, entropy = chunked_logprobs(hidden, weight, more, 0.7, 4, REAL)
    logp = ((hidden @ weight[:VOCAB].T) / 0.7).log_softmax(-1)
    right = logp.gather(1, more)
    torch.testing.assert_close(logprobs, right, rtol=1e-5, atol=1e-5)
    coefficients = torch.randn(TOKENS, 3)
    mine = gradients((logprobs * coefficients).sum(), hidden, weight)
    torch.testing.assert_close(mine, gradients((right * coefficients).sum(), hidden, weight), rtol=1e-4, atol=1e-5)
    first, of_first = chunked_logprobs(hidden, weight, targets, 0.7, 4, REAL)
    assert torch.equal(first, logprobs[:, 0]) and torch.equal(of_first, entropy)


def test_no_tokens_keep_the_graph(problem):
    hidden, weight, targets = problem
    logprobs, entropy = chunked_logprobs(hidden[:0], weight, targets[:0], 1.0, 4, REAL)
    grad_hidden, grad_weight = gradients(logprobs.sum() + entropy.sum(), hidden, weight)
    assert logprobs.shape == (0,) and (grad_hidden == 0).all() and (grad_weight == 0).all()


def test_bfloat16_weights_are_multiplied_in_float32(problem):
    """N7: bfloat16 logits move log-probabilities by 1e-2; here only the inputs are rounded."""
    hidden, weight, targets = (x.detach() for x in problem)
    half_hidden, half_weight = (hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_())
    logprobs, entropy = chunked_logprobs(half_hidden, half_weight, targets, 1.0, 4, REAL)
    right = plain(half_hidden.detach().float(), half_weight.detach().float(), targets, 1.0)
    torch.testing.assert_close((logprobs, entropy), right, rtol=1e-5, atol=1e-5)
    (logprobs.sum() + entropy.sum()).backward()
    assert half_hidden.grad.dtype == half_weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_flat_and_peaked_distributions_stay_finite(problem, scale):
    hidden, weight, targets = problem
    logprobs, entropy = chunked_logprobs(hidden * scale, weight, targets, 1.0, 4, REAL)
    grads = gradients(logprobs.sum() + entropy.sum(), hidden, weight)
    assert all(torch.isfinite(x).all() for x in (logprobs, entropy, *grads)) and (entropy >= -1e-4).all()


@pytest.mark.parametrize("tile", [5, 8192])
def test_full_kl(problem, monkeypatch, tile):
    monkeypatch.setattr(logprob, "TILE_COLUMNS", tile)
    hidden, weight, _ = problem
    ref_hidden, ref_weight = (torch.randn(TOKENS, 5), torch.randn(PADDED, 5))  # the reference may be of another width
    mine = chunked_full_kl(hidden, weight, ref_hidden, ref_weight, 0.7, 4, REAL)
    logp, logq = (((h @ w[:VOCAB].T) / 0.7).log_softmax(-1) for h, w in ((hidden, weight), (ref_hidden, ref_weight)))
    right = (logp.exp() * (logp - logq)).sum(1)
    torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    coefficients = torch.randn(TOKENS)
    found, expected = (gradients(value @ coefficients, hidden, weight) for value in (mine, right))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    itself = chunked_full_kl(hidden, weight, hidden.detach(), weight.detach(), 0.7, 4, REAL)
    assert itself.abs().max() < 1e-5 and gradients(itself.sum(), hidden)[0].abs().max() < 1e-5


@pytest.mark.parametrize("tile", [5, 8192])
def test_a_draft_is_pulled_to_the_policy_which_has_no_gradient(problem, monkeypatch, tile):
    monkeypatch.setattr(logprob, "TILE_COLUMNS", tile)
    hidden, weight, _ = problem
    draft = torch.randn(TOKENS, hidden.shape[1], requires_grad=True)
    mine = chunked_draft_kl(draft, hidden, weight, 0.7, 4, REAL)
    logp, logq = (((h @ weight.detach()[:VOCAB].T) / 0.7).log_softmax(-1) for h in (hidden.detach(), draft))
    right = (logp.exp() * (logp - logq)).sum(1)
    torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    coefficients = torch.randn(TOKENS)
    found, expected = (gradients(value @ coefficients, draft)[0] for value in (mine, right))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    mine = chunked_draft_kl(draft, hidden, weight, 0.7, 4, REAL)
    assert torch.autograd.grad(mine.sum(), [hidden, weight], allow_unused=True) == (None, None)


def test_largest_block_is_one_tile(problem, monkeypatch):
    """[tokens, vocabulary] is never held."""
    monkeypatch.setattr(logprob, "TILE_COLUMNS", 6)
    sizes, matmul = [], logprob._matmul
    counting = lambda left, right, out: (sizes.append(out.numel()), matmul(left, right, out))  # noqa: E731
    monkeypatch.setattr(logprob, "_matmul", counting)
    hidden, weight, targets = problem
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, 1.0, 4, REAL)
    (logprobs.sum() + entropy.sum()).backward()
    assert max(sizes) == 24
