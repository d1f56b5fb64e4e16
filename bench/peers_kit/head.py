"""Log-probabilities and entropies from hidden states [T, 256] and an output matrix [151,936, 256] in
float32, with backward to both."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megagrpo.algo.logprob import VocabularyShard, chunked_logprobs
from peers_kit.measure import OURS, Call, Case, Cases
from peers_kit.work import scaled

VOCABULARY, HIDDEN, NUM_TOKENS = 151_936, 256, scaled(512)
BOTH, NO_GRADIENT = "log-probabilities and entropy", "log-probabilities, entropy without gradient"


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(4)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=chance).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=chance).mul_(0.05).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=chance)


def _means(hidden: Tensor, weight: Tensor, logprobs: Tensor, entropy: Tensor) -> Callable:
    """The means of all results and gradients, after backward."""
    loss = logprobs.sum()
    if entropy.requires_grad:
        loss = loss + 0.01 * entropy.sum()
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    tensors = (logprobs.detach(), entropy.detach(), hidden.grad.abs(), weight.grad.abs())
    return lambda: np.array([tensor.double().mean().item() for tensor in tensors])


def _ours(with_gradient: bool) -> Callable[[], Call]:
    def prepare() -> Call:
        hidden, weight, targets = _inputs()

        def call():
            shard = VocabularyShard(VOCABULARY)
            logprobs, entropy = chunked_logprobs(hidden, weight, targets, 1.0, 1024, shard)
            entropy = entropy if with_gradient else entropy.detach()
            return _means(hidden, weight, logprobs, entropy), {"tokens": NUM_TOKENS}

        return call

    return prepare


def _verl(checkpointed: bool) -> Callable[[], Call]:
    """As engine/fsdp/transformer_impl.py: the logits of all tokens, divided in place."""

    def prepare() -> Call:
        from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

        hidden, weight, targets = _inputs()

        def call():
            logits = hidden @ weight.t()
            logits.div_(1.0)
            if checkpointed:
                checkpoint = torch.utils.checkpoint.checkpoint
                entropy = checkpoint(entropy_from_logits, logits, use_reentrant=True)
            else:
                entropy = entropy_from_logits(logits)
            logprobs = logprobs_from_logits(logits, targets)
            return _means(hidden, weight, logprobs, entropy), {}

        return call

    return prepare


def _trl() -> Call:
    """Its entropy has no gradient."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    hidden, weight, targets = _inputs()

    def call():
        logits = (hidden @ weight.t()) / 1.0
        logprobs = selective_log_softmax(logits, targets)
        with torch.no_grad():
            entropy = entropy_from_logits(logits)
        return _means(hidden, weight, logprobs, entropy), {}

    return call


CASES = Cases(
    (
        Case(BOTH, OURS, _ours(True)),
        Case(BOTH, "verl", _verl(False)),
        Case(BOTH, "verl (entropy checkpointed)", _verl(True)),
        Case(NO_GRADIENT, OURS, _ours(False)),
        Case(NO_GRADIENT, "TRL", _trl),
    )
)
