"""Components of the loss: which tokens each has, its value and gradient, and their sum."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megagrpo.algo.advantage import with_advantages
from megagrpo.algo.loss import Denominators, LossInputs, count_streams, objective
from megagrpo.algo.rollouts import token_counts
from megagrpo.algo.statistics import alone
from megagrpo.batching.batch import build_batch
from megagrpo.batching.sample_rows import LossNeeds
from megagrpo.batching.updates import one_pass
from megagrpo.check.problems import preflight
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.data import DataConfig
from megagrpo.data.prompts import refuse_long_demonstration, whole_response
from megagrpo.data.rows import read_rows
from megagrpo.monitor.dump import write_dump
from megagrpo.tools.ranks.dumps import read_dump
from megagrpo.types import AlgoState, Outcome, Prompt, RolloutGroup, Sample, TeacherScores
from tests.experiments import experiment
from tests.unit.algo_inputs import loss_inputs
from tests.unit.test_batch import ALONE

CE = {"component": "cross_entropy"}
DISTILLED = [{"component": "rl", "weight": 0.0}]


def algorithm_of(**section) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(section)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def inputs_of(logprobs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, **more) -> LossInputs:
    more = {"advantages": row(1.0, -0.5, 2.0), "ref_logprobs": row(-1.2, -0.2, -3.0)} | more
    tensors = {"entropy": torch.zeros_like(old), "loss_mask": mask, "old_logprobs": old, "rollout_logprobs": old}
    return loss_inputs(logprobs=logprobs, **tensors, **more)


def loss_of(inputs: LossInputs, algorithm: AlgorithmConfig, counts: dict) -> tuple[torch.Tensor, dict]:
    return objective(inputs, algorithm, Denominators(5, 2, 100.0, counts))


def share_of(inputs: LossInputs, algorithm: AlgorithmConfig, counts: dict) -> tuple[float, torch.Tensor, dict]:
    """Value of the components but rl, its gradient by the log-probabilities, metrics."""
    no_rl = inputs.weights | {"rl": torch.zeros_like(inputs.logprobs).detach()}
    loss, sums = loss_of(replace(inputs, weights=no_rl), algorithm, counts)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    return float(loss), gradient, sums


def test_reverse_kl_is_the_policy_loss_of_the_teachers_lead():
    """On-policy the gradient is -(log p_T - log p) w / N, on its own tokens alone."""
    logprobs = row(-1.0, -0.5, -2.0).requires_grad_()
    more = {"teacher_logprobs": row(-0.25, -3.5, math.nan), "weights": {"distillation": row(1.0, 0.5, 0.0)}}
    inputs = inputs_of(logprobs, logprobs.detach(), row(1, 1, 1), **more)
    value, gradient, sums = share_of(inputs, algorithm_of(distillation={}), {"distillation": 2})
    assert value == pytest.approx(-(0.75 - 0.5 * 3.0) / 2)
    assert gradient.tolist() == pytest.approx([-0.75 / 2, 0.5 * 3.0 / 2, 0.0])
    assert float(sums["stream/distillation_kl"]) == pytest.approx(-(0.75 - 3.0) / 2)
    limited = algorithm_of(distillation={"loss_max": 1.0})
    gradient = share_of(inputs, limited, {"distillation": 2})[1]
    assert gradient.tolist() == pytest.approx([-0.75 / 2, 0.5 / 2, 0.0])


def test_candidates_enter_with_their_weights():
    """Only on the component's tokens, whatever stands elsewhere."""
    logprobs = row(-1.0, -0.5, -2.0).requires_grad_()
    gaps = row(3.0, 5.0, math.nan).requires_grad_()
    weights = {"rl": row(0.0, 0.0, 0.0), "distillation": row(0.5, 0.0, 0.0)}
    more = {"teacher_logprobs": row(0.0, 0.0, 0.0), "candidate_gaps": gaps, "weights": weights}
    inputs = inputs_of(logprobs, logprobs.detach(), row(1, 1, 1), **more)
    algorithm = algorithm_of(distillation={"loss": "student_topk"})
    loss, _ = loss_of(inputs, algorithm, {"distillation": 4})
    (gradient,) = torch.autograd.grad(loss, gaps)
    assert float(loss) == pytest.approx(0.5 * 3 / 4)
    assert gradient[0].tolist() == pytest.approx([0.5 / 4, 0.0, 0.0])


def test_a_mixture_is_the_sum_of_its_components():
    """Three components in one batch, each alone, and by hand; nothing leaks from where a component has no token."""
    weights = {"rl": row(0.5, 1.0, 0.0), "cross_entropy": row(0.0, 2.0, 1.0), "reference_kl": row(0.25, 0.0, 0.0)}
    logprobs = row(-1.0, -0.5, -2.0).requires_grad_()
    more = {"weights": weights, "ref_logprobs": row(-1.2, math.nan, math.nan)}
    inputs = inputs_of(logprobs, row(-1.1, -0.4, math.inf), row(1, 1, 0), **more)
    algorithm = algorithm_of(kl={"estimator": "k2"}, streams=[])
    counts = {"cross_entropy": 4, "reference_kl": 2}
    value, gradient, sums = share_of(inputs, algorithm, counts)
    of_each = [share_of(inputs, algorithm, {name: number}) for name, number in counts.items()]
    assert value == pytest.approx(sum(each[0] for each in of_each))
    torch.testing.assert_close(gradient, sum(each[1] for each in of_each))
    assert gradient.tolist() == pytest.approx([0.25 * 0.2 / 2, -2.0 / 4, -1.0 / 4])
    assert float(sums["loss/cross_entropy"]) == pytest.approx((2 * 0.5 + 2.0) / 4)
    assert float(sums["loss/reference_kl"]) == pytest.approx(0.25 * 0.02 / 2)
    rl, _ = objective(inputs, algorithm, Denominators(5, 2, 100.0))
    (of_rl,) = torch.autograd.grad(rl, logprobs)
    ratio = [math.exp(0.1), math.exp(-0.1)]
    assert float(rl) == pytest.approx(-(0.5 * ratio[0] - 0.5 * ratio[1]) / 5)
    assert of_rl[0].tolist() == pytest.approx([-0.5 * ratio[0] / 5, 0.5 * ratio[1] / 5, 0.0])


@pytest.mark.parametrize("importance", [False, True])
def test_a_stream_of_reference_kl_is_the_kl_of_the_loss(importance: bool):
    """The ratio corrects its gradient, too, when the policy is no longer the one that sampled."""
    logprobs = row(-1.0, -2.0, -0.5).requires_grad_()
    given = (logprobs, row(-2.0, -1.0, -0.5), row(1, 1, 1))
    inputs = inputs_of(*given, weights={"reference_kl": row(0.1, 0.1, 0.1)})
    kl = {"estimator": "k3+", "importance": importance}
    algorithm = algorithm_of(kl=kl, streams=[{"component": "reference_kl"}])
    of_stream = share_of(inputs, algorithm, {"reference_kl": 3})
    inputs = inputs_of(*given, advantages=row(0, 0, 0))
    loss, _ = objective(inputs, algorithm_of(kl=kl | {"loss_coef": 0.1}), Denominators(3, 1, 1.0))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert of_stream[0] == pytest.approx(float(loss))
    torch.testing.assert_close(of_stream[1], gradient[0])
    ratios = [math.e, 1 / math.e, 1.0] if importance else [1.0, 1.0, 1.0]
    gaps = [0.2, -1.8, 2.5]  # log p - log p_reference, the gradient of k2
    right = [0.1 * ratio * gap / 3 for ratio, gap in zip(ratios, gaps, strict=True)]
    assert of_stream[1].tolist() == pytest.approx(right)


def group_of(**prompt) -> RolloutGroup:
    """Three responses to a prompt of two tokens: one with a tool's tokens, one without a score."""
    scores = TeacherScores(np.array([-0.1, -0.2, -0.3, -0.4]))
    with_tool = Sample(0, [5, 6, 7, 8], [-1] * 4, "stop", 0, "", [1, 0, 0, 1], teacher=scores)
    plain = Sample(1, [9, 9], [-2] * 2, "stop", 0, "", teacher=TeacherScores([-0.5, -0.6]))
    failed = Sample(2, [4], [-3], "stop", 0, "", teacher=TeacherScores([-0.7]))
    outcomes = (Outcome("score", 1.0), Outcome("score", 0.0), Outcome("timeout"))
    prompt = Prompt(3, "", [1, 2], "", source="math", **prompt)
    return RolloutGroup(0, prompt, (with_tool, plain, failed), outcomes)


def streams_of(algorithm: AlgorithmConfig, **prompt):
    batch = build_batch([group_of(**prompt)], one_pass(1), ALONE, None, 0, None, LossNeeds(algorithm))
    return batch, {name: w.tolist() for name, w in batch.streams.weights.items()}


def test_tokens_of_each_component():
    """By who wrote them, by source, by the row; the last entry that fits counts."""
    algorithm = algorithm_of(
        distillation={},
        streams=[
            {"component": "cross_entropy", "weight": 0.1, "written_by": ["tool", "data"]},
            {"component": "cross_entropy", "weight": 0.2, "written_by": ["data"]},
            {"component": "rl", "weight": 0.5, "sources": ["code"]},
            {"component": "reference_kl", "weight": 3.0, "sources": ["math"]},
        ],
    )
    batch, weights = streams_of(algorithm, demonstration=[7, 7, 2], weights={"distillation": 0.5})
    # the demonstration comes first: then responses of 4, 2 and 1 tokens, each after its prompt
    assert batch.sample_ids.tolist() == [-1, 0, 1, 2]
    policy = [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1]
    tool = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    shown = [0, 0, 1, 1, 1] + [0] * 13
    assert batch.tokens.tolist()[:5] == [1, 2, 7, 7, 2]
    assert weights["rl"] == policy
    assert weights["distillation"] == [0.5 * each for each in policy]
    assert weights["reference_kl"] == [3.0 * each for each in policy]
    right = [0.1 * a + 0.2 * b for a, b in zip(tool, shown, strict=True)]
    assert weights["cross_entropy"] == pytest.approx(right)
    assert batch.loss_mask.int().tolist() == policy
    assert batch.trained_mask.tolist() == [a + b + c > 0 for a, b, c in zip(policy, tool, shown, strict=True)]
    assert batch.rewards.valid.tolist() == [False, True, True, False]
    assert batch.lags.sum() == 0
    teacher = batch.streams.teacher_logprobs
    assert teacher[7:11].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    counts = token_counts(batch)
    assert count_streams(counts.streams, torch.tensor([0, 1]), alone) == {
        "distillation": 2,
        "cross_entropy": 5,
        "reference_kl": 2,
    }
    assert counts.rollouts.tolist() == [0, 2, 2, 1]


def test_a_dumped_step_has_its_streams(tmp_path):
    algorithm = algorithm_of(distillation={}, streams=[{"component": "reference_kl"}])
    batch, _ = streams_of(algorithm)
    write_dump(tmp_path / "step", batch, algorithm, 0, {}, ALONE, [])
    dump = read_dump(tmp_path / "step")
    read = dump.batch(ALONE, [])
    assert dump.algorithm == algorithm and read.streams.top_ids is None
    for name, weights in batch.streams.weights.items():
        assert torch.equal(read.streams.weights[name], weights)
    assert torch.equal(read.streams.teacher_logprobs, batch.streams.teacher_logprobs)


def test_a_response_to_learn_may_name_the_token_for_unknown_characters():
    """GPT-2's end of text, which an answer may write, is also its token for what it does not know."""
    known = {"a": 5, "<|end|>": 9}
    tokenizer = SimpleNamespace(unk_token_id=9, unk_token="<|end|>", eos_token_id=9)
    tokenizer.encode = lambda text, **_: [known.get(part, 9) for part in text.split()]
    tokenizer.convert_ids_to_tokens = lambda ids: ["a" for _ in ids]
    assert whole_response(tokenizer, "a:1", "p", "a <|end|>").tolist() == [5, 9, 9]
    with pytest.raises(ValueError, match="a:1: the tokenizer does not know every character of the response 'a b'"):
        whole_response(tokenizer, "a:1", "p", "a b")


def test_a_long_demonstration_is_refused():
    prompts = [group_of().prompt, replace(group_of(demonstration=[7] * 9).prompt, location="a:2")]
    refuse_long_demonstration(prompts, 9)
    with pytest.raises(ValueError, match="a:2: the demonstration has 9 tokens with its end"):
        refuse_long_demonstration(prompts, 8)


def test_what_an_earlier_sample_has_is_of_no_component():
    """Of two paths of a rollout that share a turn and a tool's answer, the second is trained on
    from its own turn on."""
    first = Sample(0, [5, 6, 7], [-1] * 3, "stop", 0, "", [1, 0, 1], rollout=0)
    second = replace(first, index=1, loss_mask=np.array([False, False, True]), shared=2)
    group = group_of()
    group = RolloutGroup(0, group.prompt, (first, second), group.outcomes[:1])
    algorithm = algorithm_of(streams=[{"component": "cross_entropy", "written_by": ["policy", "tool"]}])
    needs = LossNeeds(algorithm)
    weights = build_batch([group], one_pass(1), ALONE, needs=needs).streams.weights
    assert weights["cross_entropy"].tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 1]
    assert weights["rl"].tolist() == [0, 0, 1, 0, 1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("loss", ["reverse_kl", "teacher_topk"])
def test_reverse_kl_has_the_tokens_that_are_corrected(loss: str, keep: bool):
    """Rejected ones are not distilled, and divide only if they are kept; candidates need no correction."""
    reject = {"over": "token", "high": 2.0, "keep_denominator": keep}
    algorithm = algorithm_of(distillation={"loss": loss}, mismatch={"weight": {"name": "tis"}, "reject": reject})
    batch, _ = streams_of(algorithm)
    old = batch.rollout_logprobs + torch.arange(len(batch.tokens)).eq(2) * 3.0  # 20 times as likely
    batch = replace(batch, old_logprobs=old)
    done, _, _ = with_advantages(batch, algorithm, alone, AlgoState(), 8)
    lost = (batch.streams.weights["distillation"] != 0) & (done.streams.weights["distillation"] == 0)
    assert lost.nonzero().flatten().tolist() == ([2] if loss == "reverse_kl" else [])
    assert token_counts(done).streams["distillation"].sum() == 5 - (loss == "reverse_kl" and not keep)
    assert not done.loss_mask[2]


@pytest.mark.parametrize("mismatch", [{}, {"weight": {"name": "tis"}}, {"reject": {"high": 2.0}}])
def test_rl_alone_leaves_out_responses_that_are_cut_or_have_no_score(mismatch: dict):
    """The teacher judged them, with a correction of the mismatch as without one."""
    algorithm = algorithm_of(distillation={}, mask_truncated=True, mismatch=mismatch)
    batch, weights = streams_of(algorithm)
    cut = batch.rewards.valid & (batch.rewards.valid.cumsum(0) == 1)  # one of those with a score
    batch = replace(batch, truncated=cut, old_logprobs=batch.rollout_logprobs)
    done, _, _ = with_advantages(batch, algorithm, alone, AlgoState(), 8)
    assert done.streams.weights["distillation"].tolist() == weights["distillation"]
    left_out = torch.repeat_interleave(cut | ~batch.rewards.valid, batch.lengths)
    assert torch.equal(done.loss_mask, batch.loss_mask & ~left_out) and left_out.any()
    if "weight" in mismatch:
        assert (done.correction.weights[batch.loss_mask] == 1).all()


@pytest.mark.parametrize(
    ("value", "weights"),
    [
        ({"rl": 0, "cross_entropy": 1.5, "distillation": None}, {"rl": 0.0, "cross_entropy": 1.5}),
        ('{"rl": 2}', {"rl": 2.0}),
        (None, {}),
        ({"reward": 1}, None),
        ({"rl": -1}, None),
        ({"rl": 10**400}, None),
    ],
)
def test_weights_of_rows(tmp_path, value: object, weights: dict | None):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a", "answer": "b", "w": value}))
    data = DataConfig(path=str(file), weight_key="w")
    if weights is not None:
        assert read_rows(data)[0].weights == weights
        return
    with pytest.raises(ValueError, match=r"rows.jsonl:1: 'w' should be weights of components"):
        read_rows(data)


def test_distillation_alone_leaves_rl_no_token():
    batch, weights = streams_of(algorithm_of(distillation={}, streams=DISTILLED))
    assert not any(weights["rl"]) and sum(weights["distillation"]) == 5
    assert not batch.rl_mask.any() and not token_counts(batch).rollouts.any()
    assert not Denominators(0, 0, 1.0, {"distillation": 5}).nothing
    assert Denominators(0, 0, 1.0, {"distillation": 0}).nothing


def test_a_row_without_a_teacher_is_not_distilled():
    group = group_of()
    bare = replace(group, group_id=1, samples=tuple(replace(s, teacher=None) for s in group.samples))
    algorithm = algorithm_of(distillation={"loss": "teacher_topk", "top_k": 2})
    ids, scores = np.arange(8).reshape(4, 2), -np.arange(8.0).reshape(4, 2)
    first = replace(group.samples[0], teacher=replace(group.samples[0].teacher, top_ids=ids, top_logprobs=scores))
    group = replace(group, samples=(first, *group.samples[1:]))
    batch = build_batch([group, bare], one_pass(2), ALONE, needs=LossNeeds(algorithm))
    of_bare = batch.group_ids.repeat_interleave(batch.lengths) == 1
    assert batch.streams.weights["distillation"][of_bare].abs().sum() == 0
    assert batch.streams.weights["distillation"].sum() == 5
    assert batch.streams.top_ids[2:6].tolist() == ids.tolist()
    assert batch.streams.top_logprobs[2:6].tolist() == scores.tolist()
    assert batch.streams.top_ids[6:].abs().sum() == 0
    needs = LossNeeds(algorithm, candidates=False)  # of a rank of an earlier stage
    earlier = build_batch([group, bare], one_pass(2), ALONE, needs=needs).streams
    assert earlier.top_ids is None and earlier.top_logprobs is None
    assert torch.equal(earlier.teacher_logprobs, batch.streams.teacher_logprobs)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"path": "d", "demonstration_key": "shown"}}, "data.demonstration_key and a"),
        ({"algorithm": {"streams": [CE | {"written_by": ["data"]}]}}, "data.demonstration_key and"),
        ({"algorithm": {"streams": [CE | {"written_by": ["tool"]}]}}, "written_by tool: responses"),
        ({"data": {"path": "d", "weight_key": "w"}}, "data.weight_key has weights of components"),
        ({"actor": {"draft": {}}, "algorithm": {"streams": [CE]}}, "a trained draft with several"),
    ],
)
def test_what_does_not_go_together_with_other_sections(sections: dict, message: str):
    with pytest.raises(ValueError, match=message):
        experiment(**sections)
    kept = {"actor": {"draft": {"train": False}}, "algorithm": {"streams": [CE]}}
    assert experiment(**kept).algorithm.components == ("rl", "cross_entropy")


def test_streams_without_tokens_are_found_by_check(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a", "answer": "1", "s": "math"}, {"prompt": "b", "answer": "2", "s": "code"}]
    file.write_text("\n".join(json.dumps(row | {"w": {"reference_kl": 1}}) for row in rows))
    config = experiment(
        data={"path": str(file), "source_key": "s", "weight_key": "w"},
        algorithm={"streams": [CE | {"sources": ["math", "maths"]}]},
    )
    found = "\n".join(preflight(config))
    assert "no row is of source 'maths'; there are: code, math" in found
    assert "rows.jsonl:2: weights of reference_kl, which no stream gives a token" in found


def test_an_evaluation_and_a_warm_up_need_no_rows_of_a_streams_source(tmp_path):
    for source in ("math", "code"):
        (tmp_path / source).with_suffix(".jsonl").write_text(json.dumps({"prompt": "a", "answer": "1", "s": source}))
    other = {"path": str(tmp_path / "code.jsonl")}
    config = experiment(
        data={"path": str(tmp_path / "math.jsonl"), "source_key": "s"},
        eval={"data": other},
        sft=other | {"model": str(tmp_path)},
        algorithm={"streams": [CE | {"sources": ["math"]}]},
    )
    assert "no row is of source" not in "\n".join(preflight(config))
