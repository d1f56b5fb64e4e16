"""Losses of router logits; each rank computes the part of its own tokens, and the parts sum to the
whole.

balance: of sequences, DeepSeek-V3's (arXiv 2412.19437, equations 17 to 20). For a sequence of T
tokens, E experts and K a token: sum_i f_i P_i, with f_i = E / (K T) times the tokens whose K
largest scores have expert i (a constant to the gradient), and P_i the mean over its tokens of
expert i's score, scores divided by their sum. It is 1 when all experts are alike. z: mean over
tokens of (log sum_i exp logit_i)^2 (ST-MoE, arXiv 2202.08906, equation 5).
"""

import torch
from torch import Tensor


def chosen_experts(
    logits: Tensor, sequence: Tensor, num_sequences: int, experts_per_token: int
) -> Tensor:
    """Returns how many tokens of each sequence chose each expert, [num_sequences, E] int64, without
    biases or groups.

    logits: [T, E]. sequence: [T] int64, from 0; num_sequences for tokens that belong to none.
    Scores grow with logits, so the largest logits choose.
    """
    num_experts = logits.shape[1]
    chosen = (
        logits.detach().topk(experts_per_token, dim=1).indices + sequence[:, None] * num_experts
    )
    counts = torch.zeros((num_sequences + 1) * num_experts, dtype=torch.int64, device=logits.device)
    counts.index_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
    return counts.view(-1, num_experts)[:num_sequences]


def balance_part(
    logits: Tensor,
    sequence: Tensor,
    counts: Tensor,
    lengths: Tensor,
    experts_per_token: int,
    sigmoid: bool,
) -> Tensor:
    """Returns these tokens' part of the sum over sequences of the balance loss: scalar, float32,
    with gradient.

    counts: chosen_experts of ALL tokens of each sequence, [n, E]. lengths: their tokens, [n] int64.
    sigmoid: scores are sigmoids divided by their sum, else a softmax. Logits and sequence as for
    chosen_experts.
    """
    logits = logits.float()
    if sigmoid:
        scores = logits.sigmoid()
        scores = scores / (scores.sum(1, keepdim=True) + 1e-20)
    else:
        scores = logits.softmax(1)
    # d loss / d score of a token of sequence s: f_i / T
    weight = counts * (logits.shape[1] / experts_per_token / lengths.double() ** 2)[:, None]
    weight = torch.cat((weight, weight.new_zeros(1, logits.shape[1]))).float()
    return (scores * weight[sequence]).sum()


def z_part(logits: Tensor, real: Tensor) -> Tensor:
    """Returns the sum over the real tokens, [T] bool, of their logits' squared log-sum-exp: scalar,
    float32."""
    return (logits.float().logsumexp(1).square() * real).sum()
