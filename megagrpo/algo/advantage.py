"""From rewards to advantages: the order of all operations, for every estimator.

reward steps (REWARD_STEPS: scale and shift, overlong shaping, normalization, clip) -> rewards of
tokens, minus the token-level KL in the reward -> loss mask -> estimator -> whitening -> mask ->
advantage clip. Statistics are exact and global over data-parallel ranks, whatever the placement of
the samples.
"""

from dataclasses import replace

from torch import Tensor

from megagrpo.algo.correction import accepted_tokens, policy_weights, staleness_metrics
from megagrpo.algo.estimators import EstimatorInputs, estimate, squared_gradients, whiten
from megagrpo.algo.kl import adapted_kl_coef, token_kl
from megagrpo.algo.policy_loss import chosen_tokens
from megagrpo.algo.reward_shaping import RewardInputs, shape_rewards
from megagrpo.algo.rollouts import by_rollout, longest_responses
from megagrpo.algo.statistics import (
    GroupStatistics,
    Reduce,
    exact_row_sums,
    group_statistics,
    moments,
    row_counts,
    to_tokens,
)
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.objective.policy_loss import CovarianceLoss
from megagrpo.types import AlgoState, Batch, Correction


def with_advantages(
    batch: Batch,
    algorithm: AlgorithmConfig,
    reduce: Reduce,
    state: AlgoState,
    max_response_tokens: int,
) -> tuple[Batch, AlgoState, dict[str, float]]:
    """Collective over data-parallel ranks. Returns the batch with advantages [T], the next state
    and metrics.

    Every rollout counts once, except in the correction of the mismatch, which counts samples.
    Samples that are invalid, rejected or (if configured) truncated lose their loss mask. The batch
    has old_logprobs if algorithm.needs_old_logprobs, and ref_logprobs if algorithm.uses_reference.
    max_response_tokens: the limit for one response.
    """
    rollouts = by_rollout(batch)
    rewards = rollouts.rewards
    sampled = rollouts.loss_mask & to_tokens(rewards.valid, rollouts.lengths)
    metrics = _spread("reward", rewards.values, reduce, rewards.valid)
    inputs = RewardInputs(
        response_lengths=longest_responses(batch),
        group_ids=rollouts.group_ids,
        num_groups=rollouts.num_groups,
        valid=rewards.valid,
        max_response_tokens=max_response_tokens,
        reduce=reduce,
    )
    shaped = shape_rewards(rewards.values, inputs, algorithm.reward, state)
    kl_rewards, state, kl_metrics = _kl_in_reward(
        rollouts, sampled, algorithm, shaped.state, reduce
    )
    trained = sampled
    if algorithm.mask_truncated:
        trained = sampled & to_tokens(~rollouts.truncated, rollouts.lengths)
    batch, mismatch_metrics = _with_trained_mask(batch, trained, algorithm, reduce)
    to_estimate = _estimator_inputs(rollouts, sampled, inputs, shaped.values, kl_rewards, algorithm)
    if algorithm.advantage.needs_squares:
        to_estimate = replace(to_estimate, squared_gradients=squared_gradients(batch))
    advantages = estimate(to_estimate, algorithm.advantage)
    trained = counted = batch.rl_mask
    shared = len(advantages) == len(rollouts.lengths)  # by the tokens of a rollout
    if shared:
        counted = row_counts(trained, rollouts.lengths)
    if algorithm.whitens:
        advantages = whiten(advantages, moments(advantages, reduce, counted))
    if algorithm.advantage_clip is not None:
        advantages.clamp_(-algorithm.advantage_clip, algorithm.advantage_clip)
    metrics |= shaped.metrics | kl_metrics | mismatch_metrics | _group_metrics(to_estimate.stats)
    metrics |= _spread("advantage", advantages, reduce, counted)
    advantages = advantages.float()
    if shared:
        advantages = to_tokens(advantages, rollouts.lengths)
    batch = replace(batch, advantages=advantages.masked_fill_(~trained, 0.0))
    if isinstance(algorithm.loss, CovarianceLoss):
        batch = replace(batch, chosen=chosen_tokens(batch, algorithm.loss, reduce))
    return batch, state, metrics


def _estimator_inputs(
    batch: Batch,
    sampled: Tensor,
    inputs: RewardInputs,
    shaped: Tensor,
    kl_rewards: Tensor | None,
    algorithm: AlgorithmConfig,
) -> EstimatorInputs:
    """Collective. Returns the estimators' input: shaped rewards [N], those of the greedy baseline
    and the group statistics. batch: one row per rollout."""
    rewards, token_rewards = _by_token(batch, sampled, shaped, kl_rewards, algorithm)
    greedy = None
    if algorithm.needs_greedy_response and batch.rewards.greedy is not None:
        greedy = shape_rewards(
            batch.rewards.greedy, inputs, algorithm.reward, AlgoState(), greedy=True
        ).values
    totals = shaped
    if kl_rewards is not None:
        totals = shaped + exact_row_sums(kl_rewards, batch.lengths)
    stats = group_statistics(totals, batch.group_ids, batch.num_groups, inputs.valid, inputs.reduce)
    return EstimatorInputs(
        rewards=rewards,
        token_rewards=token_rewards,
        totals=totals,
        greedy_rewards=greedy,
        parts=batch.rewards.parts,
        weights=batch.rewards.weights,
        group_ids=batch.group_ids,
        valid=inputs.valid,
        lengths=batch.lengths,
        sampled=sampled,
        stats=stats,
        reduce=inputs.reduce,
    )


def _kl_in_reward(
    batch: Batch, sampled: Tensor, algorithm: AlgorithmConfig, state: AlgoState, reduce: Reduce
) -> tuple[Tensor | None, AlgoState, dict[str, float]]:
    """Returns the token rewards [T] float64 or None, the state with the next KL coefficient, and
    metrics."""
    options = algorithm.kl
    if not algorithm.measures_kl_before_update:
        return None, state, {}
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None, (
        "see AlgorithmConfig.needs_old_logprobs"
    )
    kl = token_kl(batch.old_logprobs, batch.ref_logprobs, sampled, options)
    mean = moments(kl, reduce, sampled).mean
    if options.adaptive is not None:
        num_responses = _total(batch.rewards.valid, reduce)
        state = replace(
            state, kl_coef=adapted_kl_coef(options.coef, mean, num_responses, options.adaptive)
        )
    token_rewards = -options.reward_coef * kl if options.reward_coef else None
    return token_rewards, state, {"kl/coef": options.coef, "kl/reference_before_update": mean}


def _by_token(
    batch: Batch,
    sampled: Tensor,
    shaped: Tensor,
    kl_rewards: Tensor | None,
    algorithm: AlgorithmConfig,
) -> tuple[Tensor, Tensor | None]:
    """Returns the rewards [N] of the responses' last tokens and those of other tokens [T], or None
    if there are none.

    Reward steps act on the sum over a response. Their changes, except for `scale`, go to the reward
    of the last token.
    """
    parts = batch.rewards.tokens
    if parts is None:
        return shaped, kl_rewards
    parts = (parts * algorithm.reward.scale).masked_fill(~sampled, 0.0)
    rest = shaped - exact_row_sums(parts, batch.lengths)
    if kl_rewards is not None:
        parts = parts + kl_rewards
    return rest, parts


def _with_trained_mask(
    batch: Batch, trained: Tensor, algorithm: AlgorithmConfig, reduce: Reduce
) -> tuple[Batch, dict[str, float]]:
    """Returns the batch with the loss mask that is trained on and the correction of the
    trainer/rollout mismatch.

    A sequence of the correction is a sample: its tokens were sampled one after the other.
    """
    options = algorithm.mismatch
    streams = batch.streams
    distills = algorithm.distillation is not None and algorithm.distillation.loss == "reverse_kl"
    # reverse_kl is corrected too, and learns from responses that rl alone leaves out
    kept = batch.loss_mask if distills else trained
    log_ratio = None
    metrics = {}
    if options.corrects:
        assert batch.old_logprobs is not None, "see AlgorithmConfig.needs_old_logprobs"
        log_ratio = batch.old_logprobs - batch.rollout_logprobs
        log_ratio = log_ratio.double().masked_fill_(~kept, 0.0)
    if batch.lags is not None:
        metrics = staleness_metrics(batch.lags, log_ratio, trained, reduce)
    if log_ratio is None:
        return replace(batch, loss_mask=trained), metrics
    counted = trained
    correction = Correction()
    if options.reject is not None:
        # what the update's own mismatch metrics no longer see
        metrics["mismatch/logprob_abs_mean_before_rejection"] = moments(
            log_ratio.abs(), reduce, trained
        ).mean
        kept = accepted_tokens(log_ratio, kept, batch.lengths, options.reject)
        trained = trained & kept
        metrics["mismatch/rejected_fraction"] = 1 - _total(trained, reduce) / max(
            _total(counted, reduce), 1
        )
        in_denominators = counted if options.reject.keep_denominator else None
        correction = Correction(counted=in_denominators, before_rejection=counted)
    if options.weight is not None:
        weights = policy_weights(log_ratio, kept, batch.lengths, options.weight, reduce)
        correction = replace(correction, weights=weights)
    if streams is not None and distills:
        own = streams.weights["distillation"]
        if correction.counted is not None:
            correction = replace(correction, distilled=own != 0)
        own = own.masked_fill(~kept, 0.0)
        streams = replace(streams, weights=streams.weights | {"distillation": own})
    return replace(batch, loss_mask=trained, correction=correction, streams=streams), metrics


def _group_metrics(stats: GroupStatistics) -> dict[str, float]:
    present = stats.count > 0
    groups = max(int(present.sum()), 1)
    lost = present & (stats.mean <= 0)  # for maxrl
    return {
        "group/reward_std": float(stats.std.sum()) / groups,
        "group/degenerate_fraction": float((stats.degenerate & present).sum()) / groups,
        "group/nonpositive_fraction": float((lost & ~stats.degenerate).sum()) / groups,
        "group/dropped": float((~present).sum()),  # no valid response
    }


def _spread(name: str, values: Tensor, reduce: Reduce, mask: Tensor) -> dict[str, float]:
    spread = vars(moments(values, reduce, mask))
    return {f"{name}/{kind}": value for kind, value in spread.items() if kind != "count"}


def _total(flags: Tensor, reduce: Reduce) -> int:
    return int(reduce(flags.sum(), "sum"))
