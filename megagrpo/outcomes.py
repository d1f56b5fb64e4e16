"""What a step's groups looked like, before any mathematics: lengths, truncation, reward failures."""

from collections.abc import Sequence

from megagrpo.config import TrainConfig
from megagrpo.mesh import Mesh, RunStopped
from megagrpo.metrics import Metrics
from megagrpo.types import RolloutGroup


def rollout_metrics(metrics: Metrics, groups: Sequence[RolloutGroup], mesh: Mesh, train: TrainConfig) -> None:
    """Add response lengths, truncation and grader failures. Collective over data-parallel ranks.

    Raises RuntimeError on every rank when more than train.max_bad_fraction of the step's rewards are errors or timeouts.
    """
    samples = [sample for group in groups for sample in group.samples]
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    lengths = [len(sample.token_ids) for sample in samples]
    metrics.add_mean("response/length_mean", sum(lengths), len(samples))
    metrics.add_max("response/length_max", max(lengths, default=0))
    metrics.add_mean("response/truncated_fraction", sum(s.finish_reason == "length" for s in samples), len(samples))
    masks = [sample.loss_mask for sample in samples if sample.loss_mask is not None]  # of responses that may call a tool
    metrics.add_mean("response/tool_token_fraction", sum(mask.count(0) for mask in masks), sum(map(len, masks)))
    metrics.add_mean("response/tool_use_fraction", sum(0 in mask for mask in masks), len(masks))
    errors = [o for o in outcomes if o.status == "error"]
    timeouts = [o for o in outcomes if o.status == "timeout"]
    metrics.add_mean("reward/error_fraction", len(errors), len(samples))
    metrics.add_mean("reward/timeout_fraction", len(timeouts), len(samples))
    parts = mesh.gather_dp((len(errors), len(timeouts), len(samples), errors[0].detail if errors else ""))
    bad, total = sum(e + t for e, t, _, _ in parts), sum(n for _, _, n, _ in parts)
    if bad > train.max_bad_fraction * total:
        detail = next((text for *_, text in parts if text), "timeouts")
        raise RunStopped(
            f"{bad} of {total} rewards of this step are errors or timeouts, more than train.max_bad_fraction "
            f"{train.max_bad_fraction}; first: {detail}"
        )
