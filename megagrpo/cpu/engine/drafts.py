"""Stands in for the kernels of speculative decoding with one chain of drafts for each sequence, in
plain torch.

A chain of n tokens: the last sampled one, not yet in the cache, and n - 1 drafts. The draft model
proposes its most probable token. A draft is accepted with its probability by the model; the first
rejected one is replaced by a sample of the others. So every token has the model's distribution
(Leviathan et al., arXiv:2211.17192, for a proposal that is one token). Names, arguments and results
in place are those of sgl_kernel, written against sglang 0.5.21. Trees are refused.
"""

import torch
from torch import Tensor


def _slots(req_to_token: Tensor, requests: Tensor, starts: Tensor, count: int) -> Tensor:
    """Returns the cache slots [bs, count] of the tokens from `starts` on."""
    return req_to_token[requests.long()[:, None], starts.long()[:, None] + torch.arange(count)]


def assign_draft_cache_locs_contiguous_cpu(
    requests, req_to_token, seq_lens, out, pool_len, topk, num_steps
) -> None:
    """Writes the slots of the next topk * num_steps tokens of each sequence to out [bs * topk *
    num_steps]."""
    out.copy_(_slots(req_to_token, requests, seq_lens, topk * num_steps).flatten())


def assign_extend_cache_locs_cpu(requests, req_to_token, starts, ends, out, pool_len) -> None:
    """Writes the slots of tokens starts..ends of each sequence to out, one sequence after the
    other."""
    places = zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True)
    slots = torch.cat([req_to_token[request, start:end] for request, start, end in places])
    out[: len(slots)] = slots


def assign_req_to_token_pool_cpu(requests, req_to_token, starts, ends, slots, pool_len) -> None:
    """Writes the slots of tokens starts..ends of each sequence, one sequence after the other, into
    req_to_token."""
    lengths = (ends - starts).tolist()
    for request, start, own in zip(
        requests.tolist(), starts.tolist(), slots.split(lengths), strict=True
    ):
        req_to_token[request, start : start + len(own)] = own


def copy_all_layer_kv_cache_cpu(pointers, strides, targets, sources) -> None:
    """Would move entries of the cache, as trees of drafts need it; SGLang calls it once at the
    start, to the same."""
    if not torch.equal(targets, sources):
        raise NotImplementedError(
            "entries of the cache do not move on a CPU: speculative_eagle_topk must be 1"
        )


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride) -> None:
    """Writes the last accepted token of each sequence; accept_tokens [bs * stride], accept_lens
    [bs] from 1 on."""
    last = accept_lens.long()[:, None] - 1
    bonus_tokens.copy_(accept_tokens.view(-1, stride).gather(1, last)[:, 0])


def build_tree_kernel_efficient_cpu(
    parents,
    scores,
    seq_lens,
    mask,
    positions,
    index,
    next_token,
    sibling,
    topk,
    depth,
    num_tokens,
    mask_mode,
) -> None:
    """Writes the chain as a tree: positions [bs * n]; index, next_token, sibling [bs, n]; mask [bs
    * n * n]."""
    if topk != 1:
        raise NotImplementedError(
            f"trees of drafts on a CPU: speculative_eagle_topk is {topk}, and must be 1"
        )
    order = torch.arange(num_tokens)
    size = len(seq_lens)
    positions.copy_((seq_lens[:, None] + order).flatten())
    index.copy_(torch.arange(size * num_tokens).view(size, num_tokens))
    next_token.copy_(torch.where(order + 1 < num_tokens, order + 1, -1).expand(size, -1))
    sibling.fill_(-1)
    mask.copy_((order <= order[:, None]).expand(size, -1, -1).flatten())


def _commit(
    tokens: Tensor, num_accepted: Tensor, predicts: Tensor, accept_index: Tensor, accept_num: Tensor
) -> None:
    """Writes num_accepted drafts and one token more of each row of tokens [bs, n], as the kernels
    do."""
    order = torch.arange(tokens.shape[1])
    index = torch.arange(tokens.numel()).view_as(tokens)
    kept = order <= num_accepted[:, None]
    predicts.view_as(tokens)[kept] = tokens[kept].to(predicts.dtype)
    accept_index.copy_(torch.where(kept, index, -1)[:, : accept_index.shape[1]])
    accept_num.copy_(num_accepted)


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, target_predict, **_tree
) -> None:
    """Accepts drafts that are the model's most probable token; candidates, target_predict [bs,
    n]."""
    right = candidates[:, 1:] == target_predict[:, :-1]
    _commit(
        target_predict, right.long().cumprod(1).sum(1), predicts, accept_index, accept_token_num
    )


def tree_speculative_sampling_target_only(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs, threshold_single=1.0,
    threshold_acc=1.0, deterministic=True,
) -> None:  # fmt: skip
    """Samples from target_probs [bs, n, vocabulary] with uniform numbers in [0, 1): [bs, n], and
    [bs] for the last.

    Raises NotImplementedError for thresholds below 1, with which samples have another distribution.
    """
    if min(threshold_single, threshold_acc) < 1.0:
        raise NotImplementedError(
            f"thresholds of acceptance {threshold_single}, {threshold_acc}: must be 1"
        )
    drafts = candidates[:, 1:].long()
    rows = torch.arange(len(candidates))
    probabilities = target_probs[:, :-1].gather(2, drafts[:, :, None])[:, :, 0]
    num_accepted = (uniform_samples[:, :-1] < probabilities).long().cumprod(1).sum(1)
    rest = target_probs[rows, num_accepted].double()
    rejected = rows[num_accepted < drafts.shape[1]]
    rest[rejected, drafts[rejected, num_accepted[rejected]]] = 0.0
    # In float64 a sum times a float32 below 1 stays below the sum: the first larger one belongs to
    # a possible token.
    sums = rest.cumsum(1)
    threshold = sums[:, -1:] * uniform_samples_for_final_sampling.double()[:, None]
    tokens = torch.cat([drafts, drafts[:, :1]], 1)
    tokens[rows, num_accepted] = torch.searchsorted(sums, threshold, right=True)[:, 0]
    _commit(tokens, num_accepted, predicts, accept_index, accept_token_num)


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Returns each row [vocabulary] with only its top_ks most probable tokens, normalized."""
    return _renormalized(probs, lambda ordered: torch.arange(ordered.shape[1]) < top_ks[:, None])


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Returns each row with only its most probable tokens up to a sum of top_ps, normalized."""
    return _renormalized(probs, lambda ordered: ordered.cumsum(1) - ordered <= top_ps[:, None])


def _renormalized(probs: Tensor, kept) -> Tensor:
    ordered, tokens = probs.sort(dim=1, descending=True, stable=True)
    ordered = torch.where(kept(ordered), ordered, 0.0)
    return torch.zeros_like(probs).scatter_(1, tokens, ordered / ordered.sum(1, keepdim=True))
