"""Choosing experts, under the names of the fused kernels."""

import torch
from torch import Tensor


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int,
    group_topk: int,
    scaling_factor: float,
    score_function: str,
    expert_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns the probabilities [tokens, experts], 0 for experts not chosen, and which were chosen."""
    if logits.dtype == torch.float64:
        raise ValueError("Current TE does not support float64 router type")
    if score_function == "softmax":
        scores = logits.float().softmax(-1) if use_pre_softmax else logits.float()
    else:
        scores = logits.float().sigmoid()
    choice = scores if expert_bias is None else scores + expert_bias
    if group_topk:
        grouped = choice.unflatten(-1, (num_groups, -1))
        best = grouped.topk(topk // group_topk, -1).values.sum(-1).topk(group_topk, -1).indices
        open_groups = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
        choice = grouped.masked_fill(~open_groups[..., None], float("-inf")).flatten(1)
    chosen = choice.topk(topk, -1).indices
    values = scores.gather(1, chosen)
    if score_function == "softmax":
        values = values if use_pre_softmax else values.softmax(-1)
    elif topk > 1:
        values = values / (values.sum(-1, keepdim=True) + 1e-20)
    values = values * (scaling_factor or 1.0)
    probabilities = torch.zeros_like(scores).scatter(1, chosen, values)
    return probabilities.to(logits.dtype), torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)


def fused_compute_score_for_moe_aux_loss(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """Returns which experts are chosen [tokens, experts] without groups and biases, and the scores."""
    if score_function == "softmax":
        scores = logits.float().softmax(-1)
    else:
        scores = logits.float().sigmoid()
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    chosen = scores.topk(topk, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True), scores


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """Returns the load-balancing loss of Switch Transformer (Fedus et al. 2022, equation 4)."""
    scale = num_experts * coeff / (topk * total_num_tokens * total_num_tokens)
    return (probs.sum(0) * tokens_per_expert).sum() * scale
