"""From rewards to advantages: the whole order of operations, for every estimator.

scale and shift -> overlong shaping -> reward normalisation -> reward clip -> token-level KL in the reward -> estimator ->
whitening -> mask -> advantage clip. Statistics are exact and global over data-parallel ranks, whatever the placement of the samples.
"""

from dataclasses import replace

from torch import Tensor

from megagrpo.algo import estimators
from megagrpo.algo.correction import kept, policy_weights
from megagrpo.algo.reward_shaping import adapt_kl_coef, exact_row_sums, normalise_rewards, overlong_penalty, token_kl
from megagrpo.algo.statistics import GroupStatistics, Reduce, group_statistics, moments
from megagrpo.config.algorithm import (
    AlgorithmConfig,
    DrGrpoAdvantage,
    GpgAdvantage,
    GrpoAdvantage,
    GrpoPassKAdvantage,
    MismatchConfig,
    OpoAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RemaxAdvantage,
    RewardShapingConfig,
    RlooAdvantage,
)
from megagrpo.types import Batch


def with_advantages(
    batch: Batch, algorithm: AlgorithmConfig, reduce: Reduce, algo_state: dict, max_response_tokens: int
) -> tuple[Batch, dict[str, float]]:
    """The batch with advantages [N, S], and metrics that are global over data-parallel ranks. Collective over them.

    Invalid, truncated (if asked) and rejected samples lose their loss mask. Where algorithm.needs_old_logprobs the batch has
    old_logprobs, where algorithm.uses_reference ref_logprobs. algo_state (running reward moments, KL coefficient) is updated.
    """
    rewards, metrics = shaped_rewards(batch, algorithm, reduce, algo_state, max_response_tokens)
    sampled = (batch.loss_mask > 0) & batch.valid[:, None]
    penalty = None  # [N, S], the token-level KL in the reward
    if _measures_kl(algorithm):
        kl = token_kl(batch.old_logprobs, batch.ref_logprobs, sampled, algorithm.kl)
        metrics["kl/coef"] = algorithm.kl.reward_coef or algorithm.kl.loss_coef
        metrics["kl/reference_before_update"] = adapt_kl_coef(
            algorithm, algo_state, kl, sampled, _total(batch.valid, reduce), reduce
        )
        penalty = -algorithm.kl.reward_coef * kl if algorithm.kl.reward_coef else None
    batch, mismatch_metrics = _with_trained_mask(batch, sampled, algorithm, reduce)
    advantages, stats = _estimate(batch, rewards, penalty, sampled, algorithm, reduce)
    trained = batch.loss_mask > 0
    if algorithm.whiten_advantages or algorithm.advantage.name.startswith("reinforce_plus_plus"):
        advantages = estimators.whiten(advantages, moments(advantages[trained], reduce))
    advantages = advantages.masked_fill(~trained, 0.0)
    if algorithm.advantage_clip is not None:
        advantages = advantages.clamp(-algorithm.advantage_clip, algorithm.advantage_clip)
    metrics |= mismatch_metrics | _group_metrics(stats) | _spread("advantage", advantages[trained], reduce)
    return replace(batch, advantages=advantages.float()), metrics


def shaped_rewards(
    batch: Batch, algorithm: AlgorithmConfig, reduce: Reduce, algo_state: dict, max_response_tokens: int
) -> tuple[Tensor, dict[str, float]]:
    """Rewards [N] float64 after overlong shaping, normalisation and clip, 0 where invalid; and metrics of the grader's rewards."""
    options = algorithm.reward
    metrics = _spread("reward", batch.rewards[batch.valid], reduce)
    penalty = overlong_penalty(batch.lengths - batch.prompt_lengths, max_response_tokens, options.overlong)
    if options.overlong is not None:
        metrics["reward/overlong_penalty"] = moments(penalty[batch.valid], reduce).mean
    rewards = (_scaled(batch.rewards, options) + penalty).masked_fill(~batch.valid, 0.0)
    return normalise_rewards(
        rewards, batch.group_ids, batch.num_groups, batch.valid, reduce, options, algo_state
    ), metrics


def _scaled(rewards: Tensor, options: RewardShapingConfig) -> Tensor:
    return rewards.double() * options.scale + options.shift


def _estimate(
    batch: Batch, rewards: Tensor, penalty: Tensor | None, sampled: Tensor, algorithm: AlgorithmConfig, reduce: Reduce
) -> tuple[Tensor, GroupStatistics]:
    """Advantages [N, S] float64 before whitening, and the statistics of the scalar rewards r_i = sum_t R_it."""
    options = algorithm.advantage
    totals = rewards if penalty is None else rewards + exact_row_sums(penalty)
    ids, valid = batch.group_ids, batch.valid
    stats = group_statistics(totals, ids, batch.num_groups, valid, reduce, getattr(options, "std_ddof", 1))
    match options:
        case GrpoAdvantage():
            scalar = estimators.grpo(totals, ids, stats, options.eps, options.single_sample)
        case DrGrpoAdvantage() | ReinforcePlusPlusBaselineAdvantage():
            scalar = estimators.centred(totals, ids, stats, options.single_sample)
        case GrpoPassKAdvantage():
            scalar = estimators.pass_at_k(totals, ids, valid, stats, reduce, options.eps if options.normalise else None)
        case RlooAdvantage():
            scalar = estimators.leave_one_out(totals, ids, stats, options.single_sample)
        case ReinforcePlusPlusAdvantage():
            return estimators.returns(rewards, penalty, sampled, options.gamma), stats
        case RemaxAdvantage():
            assert batch.greedy_rewards is not None, "remax needs greedy_rewards"
            scalar = totals - _scaled(batch.greedy_rewards, algorithm.reward)
        case OpoAdvantage():
            scalar = estimators.optimal_baseline(
                totals, ids, valid, sampled.sum(1), stats, reduce, options.single_sample
            )
        case GpgAdvantage():
            scalar = estimators.gpg(totals, ids, valid, stats, reduce, options.alpha, options.single_sample)
    return scalar.masked_fill(~valid, 0.0)[:, None].expand(sampled.shape), stats


def _with_trained_mask(
    batch: Batch, sampled: Tensor, algorithm: AlgorithmConfig, reduce: Reduce
) -> tuple[Batch, dict[str, float]]:
    """The batch with the loss mask that is trained on, and the correction of the trainer/rollout mismatch."""
    options: MismatchConfig = algorithm.mismatch
    trained = sampled & ~batch.truncated[:, None] if algorithm.mask_truncated else sampled
    metrics: dict[str, float] = {}
    counted, weights = trained, None
    if options.reject is not None or options.weight is not None:
        log_ratio = (batch.old_logprobs - batch.rollout_logprobs).double().masked_fill(~trained, 0.0)
    if options.reject is not None:
        # what the update's own mismatch metrics no longer see
        metrics["mismatch/logprob_abs_mean_before_rejection"] = moments(log_ratio.abs()[trained], reduce).mean
        trained = kept(log_ratio, trained, options.reject)
        before, after = (_total(mask, reduce) for mask in (counted, trained))
        metrics["mismatch/rejected_fraction"] = 1 - after / max(before, 1)
    if options.weight is not None:
        weights = policy_weights(log_ratio, trained, options.weight, reduce)
    keep = options.reject is not None and options.reject.keep_denominator
    batch = replace(
        batch,
        loss_mask=batch.loss_mask.masked_fill(~trained, 0.0),
        policy_weights=weights,
        denominator_mask=counted if keep else None,
    )
    return batch, metrics


def _measures_kl(algorithm: AlgorithmConfig) -> bool:
    return algorithm.kl.reward_coef > 0 or algorithm.kl.adaptive is not None


def _group_metrics(stats: GroupStatistics) -> dict[str, float]:
    present = stats.count > 0
    groups = max(int(present.sum()), 1)
    return {
        "group/reward_std": float(stats.std.sum()) / groups,
        "group/degenerate_fraction": float((stats.degenerate & present).sum()) / groups,
        "group/dropped": float((~present).sum()),  # no valid response
    }


def _spread(name: str, values: Tensor, reduce: Reduce) -> dict[str, float]:
    of = moments(values.double(), reduce)
    return {f"{name}/mean": of.mean, f"{name}/std": of.std, f"{name}/min": of.min, f"{name}/max": of.max}


def _total(flags: Tensor, reduce: Reduce) -> int:
    return int(reduce(flags.sum(), "sum"))
