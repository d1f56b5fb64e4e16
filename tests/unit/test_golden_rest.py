"""Mismatch correction, DAPO, whitening and log-probabilities against the numbers of verl, slime, ROLL and miles."""

import math

import pytest
import torch

from megagrpo.algo.correction import accepted_tokens, policy_weights
from megagrpo.algo.dynamic_sampling import select_groups
from megagrpo.algo.estimators import whiten
from megagrpo.algo.logprob import VocabularyShard, chunked_logprobs
from megagrpo.algo.loss import count_denominators
from megagrpo.algo.policy_loss import token_loss
from megagrpo.algo.reward_shaping import overlong_penalty
from megagrpo.algo.statistics import alone, moments
from megagrpo.config.objective.correction import Band, Rejection, TruncatedImportance
from megagrpo.config.objective.policy_loss import GpgLoss, PpoClipLoss
from megagrpo.config.objective.reward_shaping import OverlongShaping
from tests.unit.algo_inputs import aggregate, policy_inputs
from tests.unit.golden_cases import cases, close, defects, load, tensor

CORRECTION, DAPO, STATS, LOSSES = ("rollout_correction.json", "dapo.json", "stats_logits.json", "policy_losses.json")


def log_ratio_and_mask(case: dict) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = case["inputs"]
    return tensor(inputs["old_log_prob"]) - tensor(inputs["rollout_log_prob"]), tensor(inputs["response_mask"]) > 0


def rejection(mode: str, threshold: str) -> Rejection:
    """verl's names: token|seq_sum|seq_mean|seq_max _ k1|k2|k3. D7: its k1 bounds act on rollout / old."""
    over, measure = mode.rsplit("_", 1)
    over = over.removeprefix("seq_")
    if measure != "k1":
        return Rejection(measure=measure, over=over, high=float(threshold))
    low, high = [*threshold.split("_"), None][:2] if "_" in threshold else (1 / float(threshold), threshold)
    return Rejection(measure="ratio", over=over, low=1 / float(high), high=1 / float(low))


def truncated(params: dict) -> TruncatedImportance:
    return TruncatedImportance(name="tis", over=params["rollout_is"], cap=float(params["rollout_is_threshold"]))


def weights_of(log_ratio: torch.Tensor, mask: torch.Tensor, options) -> torch.Tensor:
    """policy_weights of whole rows [n, S]."""
    lengths = torch.full((len(mask),), mask.shape[1])
    return policy_weights(log_ratio.flatten(), mask.flatten(), lengths, options, alone).view(mask.shape)


def kept_of(log_ratio: torch.Tensor, mask: torch.Tensor, options: Rejection) -> torch.Tensor:
    """accepted_tokens of whole rows [n, S]."""
    lengths = torch.full((len(mask),), mask.shape[1])
    return accepted_tokens(log_ratio.flatten(), mask.flatten(), lengths, options).view(mask.shape)


@pytest.mark.parametrize("case", cases(CORRECTION, ("reference",), lambda c: "rollout_is" in c["params"]))
def test_verl_importance_weights(case):
    log_ratio, mask = log_ratio_and_mask(case)
    normalize = {"self_normalize": case["params"]["rollout_is_batch_normalize"]}
    options = truncated(case["params"]).model_copy(update=normalize)
    close(weights_of(log_ratio, mask, options), case["outputs"]["weights"], where=mask)


@pytest.mark.parametrize("case", cases(CORRECTION, ("reference", "convention"), lambda c: "rollout_rs" in c["params"]))
def test_verl_rejection(case):
    log_ratio, mask = log_ratio_and_mask(case)
    modes, thresholds = (case["params"]["rollout_rs"].split(","), case["params"]["rollout_rs_threshold"].split(","))
    left = mask
    for mode, threshold in zip(modes, thresholds, strict=True):
        left = left & kept_of(log_ratio, mask, rejection(mode, threshold))
    close(left.double(), case["outputs"]["mask"])


@pytest.mark.parametrize("case", cases(CORRECTION, ("reference",), lambda c: c["source"].startswith("slime")))
def test_slime_weights(case):
    log_ratio, mask = log_ratio_and_mask(case)
    low, high = float(case["params"]["tis_clip_low"]), float(case["params"]["tis_clip"])
    if "icepop" in case["source"]:
        options = Band(name="icepop", low=low, high=high)
    else:
        options = TruncatedImportance(name="tis", floor=low, cap=high)
    close(weights_of(log_ratio, mask, options), case["outputs"]["weights"], where=mask)


@pytest.mark.parametrize("case", cases(CORRECTION, ("reference",), lambda c: c["source"].startswith("roll")))
def test_roll_weights_and_filter(case):
    log_ratio, mask = log_ratio_and_mask(case)
    params = case["params"]
    options = TruncatedImportance(name="tis", over=params["weight_type"], cap=float(params["upper_bound"]))
    close(weights_of(log_ratio, mask, options), case["outputs"]["weights"], where=mask)
    over = {"token": "token", "sequence": "sum", "geometric": "mean"}[params["weight_type"]]
    low, high = params["filter_ratio"]
    mine = kept_of(log_ratio, mask, Rejection(over=over, low=low, high=high))
    close(mine.double(), case["outputs"]["filter_mask"], where=mask)


@pytest.mark.parametrize("case", cases(LOSSES, ("reference", "convention"), lambda c: c["case"].startswith("bypass")))
def test_verl_bypass_mode(case):
    """The rollout's log-probs stand in for the old ones, so the weights are those of the live policy, detached."""
    inputs, params = case["inputs"], case["params"]
    old, advantages = tensor(inputs["old_log_prob"]), tensor(inputs["advantages"])
    logp, mask = tensor(inputs["log_prob"]).requires_grad_(), tensor(inputs["response_mask"]) > 0
    log_ratio, left = (logp - old).detach(), mask
    policy = policy_inputs(logp, old, advantages, mask)
    if params["rollout_rs"]:
        left = kept_of(log_ratio, mask, rejection(params["rollout_rs"], params["rollout_rs_threshold"]))
    if params["loss_type"] == "reinforce":
        value = token_loss(policy, GpgLoss()).value.view_as(logp) * weights_of(log_ratio, mask, truncated(params))
    else:
        value = token_loss(policy, PpoClipLoss()).value.view_as(logp)  # its ratio is the correction already
    loss = aggregate(value, left, params["loss_agg_mode"], count_denominators((left > 0).sum(1), alone, 1.0))
    (gradient,) = torch.autograd.grad(loss, logp)
    close(loss, case["outputs"]["loss"])
    close(gradient, case["outputs"]["grad_log_prob"])


@pytest.mark.parametrize("case", cases(DAPO, ("reference",), lambda c: c["case"].startswith("overlong")))
def test_overlong(case):
    params, factor = case["params"], float(case["params"]["penalty_factor"])
    options = OverlongShaping(buffer_tokens=params["overlong_buffer_len"], factor=factor)
    mine = overlong_penalty(torch.tensor(case["inputs"]["lengths"]), params["max_resp_len"], options)
    theirs = tensor(case["outputs"]["overlong_reward"]).clamp(min=-factor)  # unbounded there beyond the maximum length
    close(mine, theirs.tolist())


def test_overlong_off():
    """N5: a buffer of 0 divides by 0 elsewhere. N6: no section raises there. Both mean off here."""
    lengths = torch.tensor([1, 50, 64])
    for options in (None, OverlongShaping(buffer_tokens=0)):
        assert overlong_penalty(lengths, 64, options).tolist() == [0.0, 0.0, 0.0]


def kept_groups(case: dict) -> list[int]:
    groups = case["inputs"]["group"]
    names = sorted(set(groups))
    ids, metric = torch.tensor([names.index(g) for g in groups]), tensor(case["inputs"]["metric"])
    valid = torch.ones(len(ids), dtype=torch.bool)
    selection = select_groups(metric, ids, len(names), valid, limit=1000, reduce=alone)
    return [names[i] for i in selection.chosen]


@pytest.mark.parametrize(
    "case", cases(DAPO, ("reference", "convention", "defect"), lambda c: c["case"].startswith("filter"))
)
def test_dynamic_sampling(case):
    """D12: std > 0 keeps constant groups whose float mean is off by a bit. n = 1 is kept by verl, dropped here."""
    groups, outputs = case["inputs"]["group"], case["outputs"]
    theirs = [g for g in outputs["kept_groups"] if groups.count(g) > 1]
    if case["status"] == "defect":
        theirs = [g for g in theirs if g not in outputs["constant_groups_kept"]]
        assert outputs["constant_groups_kept"], "no defect to show"
    assert kept_groups(case) == sorted(theirs)  # listed there by first appearance


@pytest.mark.parametrize("case", cases(STATS, ("reference",), lambda c: c["case"].startswith("whiten")))
def test_whitening(case):
    values, mask = tensor(case["inputs"]["values"]), tensor(case["inputs"]["mask"]) > 0
    spread = moments(values[mask], alone)
    mine = whiten(values, spread) + (0 if case["params"]["shift_mean"] else spread.mean)
    outputs = case["outputs"]
    noise = 1e-4 if "offset100" in case["case"] and "whitened_f64" not in outputs else 2e-6
    close(mine, outputs.get("whitened_f64", outputs["whitened"]), rtol=1e-5, atol=noise, where=mask)


@pytest.mark.parametrize("case", cases(STATS, ("reference", "convention"), lambda c: c["case"].startswith("logits")))
def test_logprobs_and_entropy(case):
    """An identity weight makes hidden states the logits. N7: bfloat16 is off by 1e-2; the float64 case is right."""
    logits = tensor(case["inputs"]["logits"], torch.float32).requires_grad_()
    labels = torch.tensor(case["inputs"]["labels"], dtype=torch.int64)
    vocab = logits.shape[1]
    mine, entropy = chunked_logprobs(logits, torch.eye(vocab), labels, 1.0, 2, VocabularyShard(vocab))
    outputs = case["outputs"]
    # float32 elsewhere: p * 1000 costs 2e-4 of the entropy
    if case["status"] == "convention" or "offset_1e3" in case["case"]:
        truth = case["case"].rsplit(".", 1)[0] + ".f64"
        outputs = next(c["outputs"] for c in load(STATS) if c["case"] == truth)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    close(mine, outputs.get("log_probs", outputs.get("logprobs_from_logits")), **tolerance)
    close(entropy, outputs.get("entropy", outputs.get("entropy_from_logits")), **tolerance)
    for name, value in (("grad_logits_of_sum_logprob_row0", mine), ("grad_logits_of_sum_entropy_row0", entropy)):
        if name in outputs:
            (gradient,) = torch.autograd.grad(value.sum(), logits, retain_graph=True)
            close(gradient[0], outputs[name], **tolerance)
    if "grad_row0_of_sum_logprob_plus_entropy" in outputs:
        (gradient,) = torch.autograd.grad((mine + entropy).sum(), logits)
        close(gradient[0], outputs["grad_row0_of_sum_logprob_plus_entropy"], **tolerance)
    assert math.isfinite(float(mine.detach().sum()))


def test_every_defect_of_the_golden_files_is_shown():
    """test_golden_advantages.py, test_golden_losses.py and this file show them."""
    of_advantages = {"D1", "D2", "D6", "D9", "D15", "D16", "D21", "D23", "N1", "N2", "N8"}
    assert defects("advantages.json") <= of_advantages
    assert defects(LOSSES, "agg_loss.json", "kl.json") <= {"D3", "D4", "D8", "D20", "N10"}
    assert defects(CORRECTION, DAPO, STATS) <= {"D12", "N5", "N6"}
