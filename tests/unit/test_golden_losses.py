"""Policy losses, aggregation and KL forms against the numbers of verl, slime and ROLL: values and gradients."""

from itertools import pairwise

import pytest
import torch

from megagrpo.algo.kl import kl_penalty
from megagrpo.algo.loss import Denominators, count_denominators, objective
from megagrpo.algo.policy_loss import chosen_tokens, token_loss
from megagrpo.algo.statistics import alone
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.objective.kl import KlConfig
from megagrpo.config.objective.policy_loss import CispoLoss, CovarianceLoss, GpgLoss
from tests.unit.algo_inputs import aggregate, batch_of, loss_inputs, policy_inputs
from tests.unit.golden_cases import cases, close, load, tensor

pytestmark = pytest.mark.verifies(
    "algorithms",
    "losses, estimators, KL, corrections: closed forms, gradients, golden numbers of "
    "verl's, ROLL's and TRL's functions",
    "unit/test_golden_*.py",
    "unit/test_algo_*.py",
)

LOSSES, AGGREGATION, KL = "policy_losses.json", "agg_loss.json", "kl.json"


class Problem:
    """The tensors of a policy-loss case; sum-norm is compared as a plain sum over C (D4: upstream's name says mean)."""

    def __init__(self, case: dict):
        inputs, params = case["inputs"], case["params"]
        self.old, self.advantages = tensor(inputs["old_log_prob"]), tensor(inputs["advantages"])
        self.logp = tensor(inputs["log_prob"]).requires_grad_()
        self.mask = tensor(inputs["response_mask"]) > 0
        self.weights = tensor(inputs["rollout_is_weights"]) if inputs.get("rollout_is_weights") else None
        info = params.get("global_batch_info") or {}
        counted = count_denominators((self.mask > 0).sum(1), alone, 1.0)
        self.aggregation = params.get("loss_agg_mode", "token-mean")
        sequences = info.get("global_batch_size", counted.num_sequences)
        if self.aggregation == "seq-mean-token-sum-norm":
            sequences = 1
        scale = info.get("loss_scale_factor", self.mask.shape[1])
        self.denominators = Denominators(info.get("batch_num_tokens", counted.num_tokens), sequences, float(scale))
        # Their loss is multiplied by dp_size because their gradients are averaged over ranks; ours are summed.
        self.factor = info.get("dp_size", 1) if self.aggregation != "seq-mean-token-sum-norm" else 1

    def objective(self, loss: dict, aggregation: str | None = None) -> tuple[torch.Tensor, dict]:
        zero = torch.zeros_like(self.old)
        given = (self.logp, zero, self.mask, self.advantages, self.old, zero)
        algorithm = AlgorithmConfig(loss=loss, aggregation=aggregation or self.aggregation)
        chosen = None
        if isinstance(algorithm.loss, CovarianceLoss):  # by the log-probabilities that verl chooses by
            by = {"old_logprobs": self.logp.detach(), "advantages": self.advantages}
            rewards, groups = zero[:, 0], [0] * len(zero)
            chosen = chosen_tokens(batch_of(rewards, groups, self.mask, **by), algorithm.loss, alone)
        inputs = loss_inputs(*given, policy_weights=self.weights, chosen=chosen)
        value, sums = objective(inputs, algorithm, self.denominators)
        return value * self.factor, sums

    def check(self, value: torch.Tensor, loss: float | None, gradient) -> None:
        (mine,) = torch.autograd.grad(value, self.logp)
        if loss is not None:
            close(value, loss)
        close(mine, gradient)


def clip(params: dict, name: str) -> dict:
    low, high = params["clip_ratio_low"], params["clip_ratio_high"]
    return {"name": name, "clip_ratio_low": low, "clip_ratio_high": high}


def verl_loss(case: dict) -> dict:
    params, kind = case["params"], case["source"].split("compute_policy_loss_")[1]
    if kind == "sapo":
        return {"name": "sapo", "tau_positive": float(params["tau_pos"]), "tau_negative": params["tau_neg"]}
    if kind == "dro":
        return {"name": "dro", "beta": params["dro_beta"]}
    if kind == "kl_cov":
        return {"name": kind, "fraction": params["kl_cov_ratio"], "kl_coef": params["ppo_kl_coef"]}
    if kind == "clip_cov":
        own = {"low": params["clip_cov_lb"], "high": params["clip_cov_ub"], "fraction": params["clip_cov_ratio"]}
        return clip(params, kind) | own
    if kind == "vanilla":
        return {**clip(params, "ppo_clip"), "dual_clip": float(params["clip_ratio_c"])}
    if kind.startswith("dppo"):
        return {
            "name": "dppo",
            "against": "old",
            "divergence": kind.removeprefix("dppo_"),
            "low": params["clip_ratio_low"],
            "high": params["clip_ratio_high"],
            "ratio_limit": params["clip_ratio_c"],
        }
    if kind == "geo_mean":
        return clip(params, "gmpo")
    more = {"gspo": {"clamp": "above"}}.get(kind, {})
    return {"name": "gpg"} if kind == "gpg" else clip(params, kind) | more


BY_SEQUENCE = ("gspo", "geo_mean")  # whatever verl's aggregation


def is_verl(case):
    offered = ("vanilla", "gspo", "cispo", "gpg", "sapo", "dppo_tv", "dppo_kl", "dro", "clip_cov", "kl_cov")
    if case["source"].endswith("geo_mean"):
        # its weights are geometric means too, an empty row counts, ratios have no limit, and
        # advantages that differ by token are replaced by their mean
        conventions = ("is_weights", "one_empty_row", "extreme_ratios", "tokenadv")
        return not any(name in case["case"] for name in conventions)
    return case["source"].startswith("verl") and case["source"].endswith(offered)


@pytest.mark.parametrize("case", cases(LOSSES, ("reference", "convention"), is_verl))
def test_verl(case):
    problem = Problem(case)
    ignores_aggregation = case["source"].endswith(BY_SEQUENCE)
    value, sums = problem.objective(verl_loss(case), "seq-mean-token-mean" if ignores_aggregation else None)
    outputs = case["outputs"]
    loss = outputs.get("loss_f64", outputs["loss"])
    if case["source"].endswith("clip_cov") and case["status"] == "convention":
        loss = None  # a clipped token that is drawn counts 0 here
    problem.check(value, loss, outputs["grad_log_prob"])
    if case["source"].endswith("vanilla"):
        num_tokens = int(problem.mask.sum())
        clipped = (sums["policy/clip_fraction_low"] + sums["policy/clip_fraction_high"]) / num_tokens
        found = [float(clipped), float(sums["policy/clip_fraction_dual"] / num_tokens)]
        assert found == pytest.approx([outputs["pg_clipfrac"], outputs["pg_clipfrac_lower"]], abs=1e-6)


@pytest.mark.parametrize("case", cases(LOSSES, ("reference",), lambda c: c["source"].startswith("slime")))
def test_slime(case):
    problem, params, outputs = Problem(case), case["params"], case["outputs"]
    name = next((name for name in ("gspo", "cispo") if name in case["source"]), "ppo_clip")
    aggregation = "seq-mean-token-mean" if name == "gspo" else "token-mean"
    loss = {"name": name, "clip_ratio_low": min(float(params["eps_clip"]), 1.0)}
    loss["clip_ratio_high"] = params["eps_clip_high"]
    if name == "ppo_clip":
        loss["dual_clip"] = None if params["eps_clip_c"] is None else float(params["eps_clip_c"])
    value, _ = problem.objective(loss, aggregation)
    problem.check(value, outputs[f"loss_{aggregation.replace('-', '_')}"], outputs["grad_log_prob"])


ROLL = {  # pg_variant -> our loss
    "ppo": {"name": "ppo_clip"},
    "vanilla": {"name": "gpg"},
    "tis": {"name": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.0},  # weight min(ratio, 1)
    "cispo": {"name": "cispo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.1},  # its own bounds, whatever pg_clip says
}


@pytest.mark.parametrize(
    "case", cases(LOSSES, ("reference", "convention"), lambda c: c["params"].get("pg_variant") in ROLL)
)
def test_roll(case):
    problem, params = Problem(case), case["params"]
    loss = dict(ROLL[params["pg_variant"]])
    if params["pg_variant"] == "ppo":
        low, high = ("pg_clip_low", "pg_clip_high") if params["use_pg_clip_range"] else ("pg_clip", "pg_clip")
        dual = 1 + 2 * params["pg_clip"] if params["dual_clip_loss"] else None  # N9: their constant
        loss |= {"clip_ratio_low": params[low], "clip_ratio_high": params[high], "dual_clip": dual}
    problem.check(problem.objective(loss)[0], case["outputs"]["loss"], case["outputs"]["grad_log_prob"])


@pytest.mark.parametrize("case", cases(LOSSES, ("reference",), lambda c: c["params"].get("pg_variant") == "topr"))
def test_roll_topr_is_two_of_our_losses(case):
    """Right answers are imitated (-log p A), wrong ones weighted by min(ratio, 1)."""
    problem = Problem(case)
    scores = case["notes"].split("scores=[")[1].split("]")[0].split(",")
    positive = torch.tensor([float(score) > 0 for score in scores])[:, None]
    inputs = policy_inputs(problem.logp, problem.old, problem.advantages, problem.mask)
    right, wrong = (
        token_loss(inputs, options).value.view_as(problem.logp)
        for options in (GpgLoss(), CispoLoss(clip_ratio_high=0.0))
    )
    value = aggregate(torch.where(positive, right, wrong), problem.mask, problem.aggregation, problem.denominators)
    problem.check(value, case["outputs"]["loss"], case["outputs"]["grad_log_prob"])


@pytest.mark.parametrize("case", cases(LOSSES, ("defect",), lambda c: c["defects"] == ["D20"]))
def test_masked_tokens_have_no_gradient(case):
    """D20: a numerator that is not multiplied by the mask trains on padding and tool output; ours is 0 there."""
    problem = Problem(case)
    theirs = tensor(case["outputs"]["grad_log_prob"])
    (mine,) = torch.autograd.grad(problem.objective({"name": "gpg"}, "token-mean")[0], problem.logp)
    assert (mine[~problem.mask] == 0).all()
    assert problem.mask.all() or theirs[~problem.mask].abs().max() > 0, "no defect to show"


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "gmpo", "dppo", "cispo", "gpg", "sapo", "dro"])
def test_every_case_is_finite_whatever_the_ratios(loss):
    """N10: extreme ratios and empty rows give infinities elsewhere."""
    for case in load(LOSSES):
        problem = Problem(case)
        value, _ = problem.objective({"name": loss}, "seq-mean-token-mean")
        (gradient,) = torch.autograd.grad(value, problem.logp)
        assert torch.isfinite(value) and torch.isfinite(gradient).all(), case["case"]


# Aggregation


def aggregated(case: dict) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Our value, the matrix it came from, and what theirs is multiplied by."""
    params = case["params"]
    matrix = tensor(case["inputs"]["loss_mat"]).requires_grad_()
    mask = tensor(case["inputs"]["loss_mask"]) > 0
    counted, mode = count_denominators((mask > 0).sum(1), alone, 1.0), params["loss_agg_mode"]
    info = params.get("global_batch_info") or {}
    sequences = params.get("global_valid_samples", info.get("global_batch_size", counted.num_sequences))
    tokens = params.get("batch_num_tokens", info.get("batch_num_tokens", counted.num_tokens))
    scale = float(info.get("loss_scale_factor", mask.shape[1]))
    factor = sequences if mode == "seq-mean-token-sum-norm" else info.get("dp_size", 1)  # D4: a sum there, a mean here
    return aggregate(matrix, mask, mode, Denominators(tokens, sequences, scale)), matrix, factor


def not_micro(case):
    return not case["case"].startswith("micro.")


@pytest.mark.parametrize("case", cases(AGGREGATION, ("reference", "convention"), not_micro))
def test_aggregation(case):
    value, matrix, factor = aggregated(case)
    close(value * factor, case["outputs"]["loss"])
    if "grad_loss_mat" in case["outputs"]:
        (gradient,) = torch.autograd.grad(value * factor, matrix)
        close(gradient, case["outputs"]["grad_loss_mat"])


@pytest.mark.parametrize("case", cases(AGGREGATION, ("defect",)))
def test_only_unmasked_tokens_count(case):
    """D20 and N10: the same sum with the mask applied to the numerator first, so NaN off the mask stays there."""
    value, _, _ = aggregated(case)
    matrix, mask = tensor(case["inputs"]["loss_mat"]), tensor(case["inputs"]["loss_mask"]) > 0
    clean = torch.where(mask, matrix, torch.zeros(()).double())
    expected = aggregated({**case, "inputs": {**case["inputs"], "loss_mat": clean.tolist()}})[0]
    assert torch.isfinite(value) and value.item() == expected.item()


@pytest.mark.parametrize("case", cases(AGGREGATION, ("reference",), lambda c: c["case"].startswith("micro.")))
def test_micro_batches_add_up(case):
    """D5: a mean of micro-batch means weighs tokens by the luck of the split; shares of a global mean do not."""
    outputs, mode = case["outputs"], case["params"]["loss_agg_mode"]
    matrix, mask = tensor(case["inputs"]["loss_mat"]), tensor(case["inputs"]["loss_mask"]) > 0
    denominators, cuts = (count_denominators((mask > 0).sum(1), alone, 1.0), case["params"]["row_cuts"])
    shares = [aggregate(matrix[a:b], mask[a:b], mode, denominators) for a, b in pairwise(cuts)]
    close(aggregate(matrix, mask, mode, denominators), outputs["full_batch"])
    close(torch.stack(shares), outputs["micro_with_global_info"])
    close(sum(shares), outputs["sum_of_micro_with_global_info"])
    assert abs(float(sum(shares)) - outputs["mean_of_micro_without_info"]) > 1e-4


# KL

ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


@pytest.mark.parametrize("case", cases(KL, ("reference", "convention")))
def test_kl(case):
    """Conventions are values beyond a clamp: slime's low_var_kl clamps, its k3 does not."""
    params, inputs = case["params"], case["inputs"]
    value_clamp = 10.0 if case["status"] == "convention" and params.get("kl_loss_type") != "k3" else None
    name = params.get("kl_penalty") or params["kl_loss_type"]
    logp = tensor(inputs["log_prob"]).requires_grad_()
    value = kl_penalty(logp, tensor(inputs["ref_log_prob"]), ALIASES.get(name, name), value_clamp)
    if "importance_ratio" in params:
        value = value * (logp - tensor(inputs["old_log_prob"])).exp()
    # beyond it k3 is a constant here, infinite or clamped there
    inside = (logp - tensor(inputs["ref_log_prob"])).abs() <= 20
    if case["source"].startswith("verl"):
        inside = torch.ones_like(inside)
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    # Their exp(-x) - 1 + x loses digits near 0, so values of 1e-7 are noise there. kl_f64 is there where it differs.
    in_f64 = case["outputs"].get("kl_f64")
    close(value, in_f64 if isinstance(in_f64, list) else case["outputs"]["kl"], rtol=2e-5, atol=1e-6, where=inside)
    close(gradient, case["outputs"]["grad_log_prob"], rtol=2e-5, atol=1e-6, where=inside)


@pytest.mark.parametrize("case", cases(KL, ("defect",)))
def test_kl_forms_that_raise_elsewhere(case):
    """D3: "+" has the estimator's value and k2's gradient. D8: "full" is a KL over the vocabulary, a loss here."""
    name = case["params"]["kl_penalty"]
    if name == "full":
        assert KlConfig(loss_coef=0.1, estimator="full").estimator == "full"
        return
    base = ALIASES.get(name.removesuffix("+"), name.removesuffix("+"))
    inputs = case["inputs"] if "log_prob" in case["inputs"] else load(KL)[0]["inputs"]
    logp, ref = tensor(inputs["log_prob"]).requires_grad_(), tensor(inputs["ref_log_prob"])
    value = kl_penalty(logp, ref, base if base == "k2" else base + "+")  # k2 has its own gradient already
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    close(value, kl_penalty(logp, ref, base).tolist(), rtol=1e-12)
    close(gradient, (logp - ref).tolist(), rtol=1e-12)
