"""Held-out evaluation with its own prompts and seeds, greedy or with k samples, so it does not depend
on the order of training."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from math import comb

from megagrpo.loop.run import Run
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.group_metrics import by_source
from megagrpo.rollout.source import EvaluationStopped
from megagrpo.types import RolloutGroup


def evaluate(run: Run) -> dict[str, float]:
    """Collective. Returns eval/accuracy (mean score), eval/pass_at_k, lengths (tokens) and so on;
    {} if none is due.

    An evaluation is due before the first step (unless `eval.before_first_step` is false), every
    `eval.every` steps, and after the last. With
    `eval.num_as_trained`, a second one draws that many samples as in training, and its values are
    called eval_as_trained/. A stop request ends it without values; the next start, at the same
    step, repeats it.
    """
    config = run.config.eval
    step = run.state.step
    prompts = run.inputs.eval_prompts
    if config is None or prompts is None:
        return {}
    due = step % config.every == 0 and (step > 0 or config.before_first_step)
    if not due and step != run.num_steps:
        return {}
    metrics = Metrics()
    with suppress(EvaluationStopped):
        groups = run.evaluation_groups()
        evaluation_metrics(metrics, "eval", groups, config.num_samples)
        for name, part in by_source(groups, prompts.sources):
            evaluation_metrics(metrics, f"eval_{name}", part, config.num_samples)
        if config.num_as_trained:
            groups = run.evaluation_groups(as_trained=True)
            evaluation_metrics(metrics, "eval_as_trained", groups, config.num_as_trained)
        return metrics.reduced(run.mesh.reduce)
    run.evaluation_stopped = True
    return {}


def evaluation_metrics(
    metrics: Metrics, prefix: str, groups: Sequence[RolloutGroup], num_samples: int
) -> None:
    """Adds the mean score, pass@k of scores >= 1 for k = num_samples, and the fraction of responses
    without a score.

    A response that could not be scored counts as 0 and as not passed.
    """
    scores = [[o.value if o.ok else 0.0 for o in group.outcomes] for group in groups]
    samples = [sample for group in groups for sample in group.samples]
    values: dict[str, list[float]] = {
        "accuracy": list(chain.from_iterable(scores)),
        "unscored_fraction": [not outcome.ok for group in groups for outcome in group.outcomes],
        "length_mean": [len(sample.token_ids) for sample in samples],
        "truncated_fraction": [sample.finish_reason == "length" for sample in samples],
    }
    if num_samples > 1:
        values["pass_at_k"] = [
            pass_at_k(len(group), sum(s >= 1 for s in group), num_samples) for group in scores
        ]
    for name, each in values.items():
        metrics.add_mean(f"{prefix}/{name}", sum(each), len(each))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Returns the probability that k out of n samples, drawn without replacement, include a correct
    one (Chen et al. 2021, eq. 1)."""
    return 1.0 - comb(n - correct, k) / comb(n, k)
