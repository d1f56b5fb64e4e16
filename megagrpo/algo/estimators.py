"""Advantage estimators, one pure function each: rewards and statistics in, a float64 number per
response or token out.

Constant groups get exactly 0 from every function that compares the responses of a group. To add an
estimator: its variant in config/objective/estimators.py, its function here and its row in
ESTIMATORS.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megagrpo.algo.statistics import (
    GroupStatistics,
    Moments,
    Reduce,
    exact_group_sums,
    group_range,
    group_statistics,
    moments,
    row_counts,
    to_tokens,
)
from megagrpo.config.objective.estimators import (
    DrGrpoAdvantage,
    Estimator,
    GdpoAdvantage,
    GpgAdvantage,
    GrpoAdvantage,
    GrpoPassKAdvantage,
    MaxRlAdvantage,
    OpoAdvantage,
    OptimalTokenAdvantage,
    OwnAdvantage,
    ReinforceAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RemaxAdvantage,
    RlooAdvantage,
)
from megagrpo.types import Batch

WHITEN_EPS = 1e-8


@dataclass(frozen=True)
class EstimatorInputs:
    """The input of an estimator: N responses on this rank, T tokens with their prompts, of G groups
    over all ranks.

    A response is a rollout: the tokens of its samples one after the other, if it has several.
    """

    # [N] float64, of the last sampled token, after every reward step; 0 where not valid
    rewards: Tensor
    # [T] float64, rewards of tokens from graders minus the token-level KL times its coefficient; 0
    # off `sampled`
    token_rewards: Tensor | None
    totals: Tensor  # [N] float64, r_i = sum_t R_it: rewards plus the row sums of token_rewards
    # [N] float64, of the greedy response to the same prompt; see needs_greedy_response
    greedy_rewards: Tensor | None
    # [N, K] float64, the scores of K graders, and [K], their weights; see reads_parts
    parts: Tensor | None
    weights: Tensor | None
    group_ids: Tensor  # [N] int64 in 0..G-1
    valid: Tensor  # [N] bool, the response has a reward
    # [N] int64, tokens of prompt and response: values of tokens are one response after the other
    lengths: Tensor
    sampled: Tensor  # [T] bool, tokens that the policy sampled in valid responses
    stats: GroupStatistics  # of the valid totals, over all ranks
    reduce: Reduce
    # [T] float64, see squared_gradients; None unless the estimator needs_squares
    squared_gradients: Tensor | None = None

    def to_responses(self, per_group: Tensor) -> Tensor:
        """Returns for every response [N] the value of its group, from [G]."""
        # four times faster than per_group[group_ids]
        return per_group.index_select(0, self.group_ids)


# Takes the inputs and the variant's options. Returns float64 advantages, before whitening: [N]
# where all tokens of a response share one, else [T]. Values of invalid responses and of tokens that
# were not sampled are ignored.
EstimatorFunction = Callable[[EstimatorInputs, Any], Tensor]


def grpo(inputs: EstimatorInputs, options: GrpoAdvantage | GdpoAdvantage) -> Tensor:
    """Returns (r - mean) / (std + eps) [N]. DeepSeekMath, arXiv 2402.03300."""
    advantages = _centered(inputs) / inputs.to_responses(inputs.stats.std + options.eps)
    return _within_groups(advantages, inputs, options.single_sample)


def centered(
    inputs: EstimatorInputs, options: DrGrpoAdvantage | ReinforcePlusPlusBaselineAdvantage
) -> Tensor:
    """Returns r - mean [N]. Dr. GRPO, arXiv 2503.20783; REINFORCE++ with a baseline whitens it,
    arXiv 2501.03262."""
    return _within_groups(_centered(inputs), inputs, options.single_sample)


def leave_one_out(inputs: EstimatorInputs, options: RlooAdvantage) -> Tensor:
    """Returns r - mean of the others = n / (n - 1) (r - mean) [N]. RLOO, arXiv 2402.14740."""
    factor = inputs.stats.count / (inputs.stats.count - 1).clamp(min=1)
    return _within_groups(
        inputs.to_responses(factor) * _centered(inputs), inputs, options.single_sample
    )


def maximum_likelihood(inputs: EstimatorInputs, options: MaxRlAdvantage) -> Tensor:
    """Returns (r - mean) / mean, 0 where the mean is not positive [N]. MaxRL, arXiv 2602.02710.

    Limited to the number of responses, which only groups with rewards below 0 can exceed.
    """
    mean = inputs.stats.mean
    largest = inputs.to_responses(inputs.stats.count.double())
    advantages = _centered(inputs) / inputs.to_responses(torch.where(mean > 0, mean, torch.inf))
    return _within_groups(advantages.clamp(-largest, largest), inputs, options.single_sample)


def grpo_passk(inputs: EstimatorInputs, options: GrpoPassKAdvantage) -> Tensor:
    """Returns best - second best for the best response, 0 for all others [N]. arXiv 2503.19595.

    A tie of the best two and a group with a single valid response give 0.
    """
    r = inputs.totals
    g = inputs.group_ids
    stats = inputs.stats
    num_groups = len(stats.count)
    best = inputs.valid & (r == inputs.to_responses(stats.max))
    rest = inputs.valid & ~best
    _, second = group_range(r[rest], g[rest], num_groups, inputs.reduce)
    counts = torch.stack([torch.bincount(g[which], minlength=num_groups) for which in (best, rest)])
    num_best, num_rest = inputs.reduce(counts, "sum")
    gap = torch.where((num_best == 1) & (num_rest > 0), stats.max - second, 0.0)
    if options.normalize:
        gap = gap / (stats.std + options.eps)
    return (inputs.to_responses(gap) * best).masked_fill(inputs.to_responses(stats.degenerate), 0.0)


def reinforce(
    inputs: EstimatorInputs, options: ReinforceAdvantage | ReinforcePlusPlusAdvantage
) -> Tensor:
    """Returns the discounted return of every token [T]. REINFORCE++ whitens it, arXiv
    2501.03262."""
    return discounted_returns(inputs, options.gamma)


def remax(inputs: EstimatorInputs, options: RemaxAdvantage) -> Tensor:
    """Returns the return of every token minus the reward of the greedy response to the same prompt
    [T].

    Without token rewards that is r minus this reward. ReMax, arXiv 2310.10505.
    """
    assert inputs.greedy_rewards is not None, "remax needs greedy_rewards"
    return discounted_returns(inputs, gamma=1.0) - to_tokens(inputs.greedy_rewards, inputs.lengths)


def optimal_baseline(inputs: EstimatorInputs, options: OpoAdvantage) -> Tensor:
    """Returns r - sum_j T_j r_j / sum_j T_j [N], T_j the sampled tokens of a response. OPO, arXiv
    2505.23585."""
    valid = inputs.valid
    num_tokens = row_counts(inputs.sampled, inputs.lengths)
    g_valid = inputs.group_ids[valid]
    tokens = torch.zeros_like(inputs.stats.count).scatter_add_(0, g_valid, num_tokens[valid])
    # Relative to the mean, which changes nothing but keeps the precision of 1000 + {0, .1}.
    products = (_centered(inputs) * num_tokens)[valid]
    sums, tokens = exact_group_sums(products, g_valid, tokens, inputs.reduce)
    baseline = sums / tokens.clamp(min=1)
    return _within_groups(
        _centered(inputs) - inputs.to_responses(baseline), inputs, options.single_sample
    )


def squared_gradients(batch: Batch) -> Tensor:
    """Returns |w d log p / d logits|^2 = w^2 (1 - 2 p + sum p^2) [T] float64 of the policy before
    the step, w its weight for the mismatch with the engine, 1 off the loss mask. arXiv 2602.07078."""
    assert batch.old_logprobs is not None and batch.squares is not None
    logprobs = batch.old_logprobs.double()
    # (1 - p)^2 and those of other tokens, which are together at most as large: exact for p near 1
    own = logprobs.expm1().square()
    others = batch.squares - (2 * logprobs).exp()
    squares = own + others.clamp(min=0).minimum(own)
    if (weights := batch.correction.weights) is not None:
        # what is left out of the loss counts in the statistics all the same
        squares *= weights.masked_fill(~batch.loss_mask, 1.0).double().square()
    return squares


def optimal_token_baseline(inputs: EstimatorInputs, options: OptimalTokenAdvantage) -> Tensor:
    """Collective. Returns G_t - sum W_t G_t / sum W_t [T], W_t = sum over s <= t of
    squared_gradients; the sums are over the group's responses with a t-th sampled token. arXiv
    2602.07078."""
    assert inputs.squared_gradients is not None, "see AlgorithmConfig.needs_old_logprobs"
    sampled = inputs.sampled
    counts = row_counts(sampled, inputs.lengths)
    inside = torch.arange(max(counts.tolist(), default=0)) < counts[:, None]
    rows, steps = inside.nonzero().unbind(1)
    groups = inputs.group_ids[rows]
    energies = torch.zeros(inside.shape, dtype=torch.float64)
    energies.masked_scatter_(inside, inputs.squared_gradients[sampled])
    energies = energies.cumsum(1)[inside]
    returns = discounted_returns(inputs, gamma=1.0)[sampled]
    advantages = returns - inputs.stats.mean[groups]  # as in optimal_baseline
    # not by whether this rank has rewards of tokens: others may have them in the same group
    same = returns == inputs.totals[rows]
    advantages.masked_fill_(inputs.stats.degenerate[groups] & same, 0.0)
    # the weights of a group's t-th tokens, up to its longest response, and behind all of them the
    # products
    longest = torch.zeros_like(inputs.stats.count)
    longest = inputs.reduce(longest.scatter_reduce_(0, inputs.group_ids, counts, "amax"), "max")
    ids = (longest.cumsum(0) - longest)[groups] + steps
    size = int(longest.sum())
    sums, number = exact_group_sums(
        torch.cat((energies, energies * advantages)),
        torch.cat((ids, ids + size)),
        torch.bincount(ids, minlength=2 * size),
        inputs.reduce,
    )
    total, weighted = sums.view(2, size)
    advantages -= (weighted / total.masked_fill(total == 0, 1.0))[ids]
    single = returns if options.single_sample == "raw" else 0.0
    found = torch.where(number[ids] == 1, single, advantages)
    return torch.zeros(len(sampled), dtype=torch.float64).masked_scatter_(sampled, found)


def gdpo(inputs: EstimatorInputs, options: GdpoAdvantage) -> Tensor:
    """Collective. Returns sum_k w_k (r_k - mean_k) / (std_k + eps) [N], whitened if over responses.

    r_k, w_k: score and weight of grader k; a grader that scores a group's responses alike adds
    exactly 0. GDPO, arXiv 2601.05242.
    """
    assert inputs.parts is not None and inputs.weights is not None, "gdpo needs parts"
    advantages = torch.zeros_like(inputs.totals)
    groups = (inputs.group_ids, len(inputs.stats.count), inputs.valid, inputs.reduce)
    for scores, weight in zip(inputs.parts.unbind(1), inputs.weights, strict=True):
        scored = replace(inputs, totals=scores, stats=group_statistics(scores, *groups))
        advantages += weight * grpo(scored, options)
    if options.whitens_tokens:
        return advantages
    return whiten(advantages, moments(advantages, inputs.reduce, inputs.valid))


def gpg(inputs: EstimatorInputs, options: GpgAdvantage) -> Tensor:
    """Returns alpha (r - mean) [N], alpha = B / the responses that count. arXiv 2504.02546."""
    stats = inputs.stats
    if options.alpha == "non_degenerate":
        single = (stats.count == 1) & (options.single_sample == "raw")  # they learn too
        counted = int(stats.count[~stats.degenerate | single].sum())
    else:
        counted = int(inputs.reduce((inputs.totals[inputs.valid] != 0).sum(), "sum"))
    alpha = int(stats.count.sum()) / max(counted, 1)
    return alpha * _within_groups(_centered(inputs), inputs, options.single_sample)


def own_estimator(inputs: EstimatorInputs, options: OwnAdvantage) -> Tensor:
    """Returns the advantages from a user's function. Raises ValueError unless it returns a number
    for every response or for every token."""
    advantages = options.load()(inputs)
    sizes = [[len(inputs.valid)], [int(inputs.lengths.sum())]]
    shape = list(advantages.shape) if isinstance(advantages, Tensor) else None
    if shape not in sizes:
        raise ValueError(
            f"algorithm.advantage {options.function} returned {type(advantages).__name__}, shape {shape};"
            f" it should return a number for each response, {sizes[0]}, or token, {sizes[1]}"
        )
    return advantages.double()


ESTIMATORS: dict[type[Estimator], EstimatorFunction] = {
    GrpoAdvantage: grpo,
    DrGrpoAdvantage: centered,
    GrpoPassKAdvantage: grpo_passk,
    RlooAdvantage: leave_one_out,
    MaxRlAdvantage: maximum_likelihood,
    ReinforceAdvantage: reinforce,
    ReinforcePlusPlusAdvantage: reinforce,
    ReinforcePlusPlusBaselineAdvantage: centered,
    RemaxAdvantage: remax,
    OpoAdvantage: optimal_baseline,
    OptimalTokenAdvantage: optimal_token_baseline,
    GdpoAdvantage: gdpo,
    GpgAdvantage: gpg,
    OwnAdvantage: own_estimator,
}


def estimate(inputs: EstimatorInputs, options: Estimator) -> Tensor:
    """Returns the advantages before whitening, 0 for invalid responses: [N] float64 if all tokens of
    a response share one, else [T]."""
    advantages = ESTIMATORS[type(options)](inputs, options)
    by_response = len(advantages) == len(inputs.valid)
    return advantages.masked_fill(~(inputs.valid if by_response else inputs.sampled), 0.0)


def discounted_returns(inputs: EstimatorInputs, gamma: float) -> Tensor:
    """Returns G_t = R_t + gamma G_next [T] over sampled tokens, 0 on the others.

    R is token_rewards, plus the reward at the last sampled token. Credit passes through other
    tokens (tool output) undiscounted, as if they were not there.
    """

    rewards = inputs.token_rewards
    returns = torch.zeros(len(inputs.sampled), dtype=torch.float64)
    if rewards is not None:
        returns += rewards
    sizes = inputs.lengths.tolist()
    rows = zip(returns.split(sizes), inputs.sampled.split(sizes), inputs.rewards, strict=True)
    for row, sampled, reward in rows:
        of_row = row[sampled]
        of_row[-1:] += reward
        # of the next 1, 2, 4, ... tokens, in turn
        num_tokens, factor = 1, gamma
        while num_tokens < len(of_row):
            of_row[:-num_tokens] += factor * of_row[num_tokens:]
            num_tokens, factor = 2 * num_tokens, factor * factor
        row[sampled] = of_row
    return returns.masked_fill_(~inputs.sampled, 0.0)


def whiten(values: Tensor, spread: Moments) -> Tensor:
    """Returns (x - mean) / sqrt(var + 1e-8) in the shape of `values`, unbiased variance; unchanged
    for 0 or 1 value."""
    if spread.count < 2:
        return values
    # hypot: the square of a huge std would overflow
    return (values - spread.mean) / math.hypot(spread.std, WHITEN_EPS**0.5)


def _centered(inputs: EstimatorInputs) -> Tensor:
    return inputs.totals - inputs.to_responses(inputs.stats.mean)


def _within_groups(
    advantages: Tensor, inputs: EstimatorInputs, single: Literal["zero", "raw"]
) -> Tensor:
    """Returns [N] with 0 in constant groups and, where `single` is "raw", the reward itself in
    groups of one."""
    advantages = advantages.masked_fill(inputs.to_responses(inputs.stats.degenerate), 0.0)
    if single == "zero":
        return advantages
    return torch.where(inputs.to_responses(inputs.stats.count == 1), inputs.totals, advantages)
