"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a step trains on the next groups whose
rewards differ.

Complete groups beyond the batch are the surplus: they come first in the next step, sampled one step
earlier, which the mismatch metrics and corrections see. Every decision is on all-reduced values.
"""

from collections.abc import Sequence

import torch

from megagrpo.algo.dynamic_sampling import Selection, select_groups
from megagrpo.algo.reward_shaping import overlong_penalty
from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import Mesh, RunStopped
from megagrpo.types import RolloutGroup


def select(groups: Sequence[RolloutGroup], config: ExperimentConfig, mesh: Mesh) -> Selection:
    """Collective over data-parallel ranks. Returns the chosen, surplus and dropped ids of all
    ranks' groups."""
    algorithm = config.algorithm
    assert algorithm.dynamic_sampling is not None
    # Ascending, so groups carried over from the step before come first.
    all_ids = sorted(
        group_id for part in mesh.gather_dp([g.group_id for g in groups]) for group_id in part
    )
    index = {group_id: i for i, group_id in enumerate(all_ids)}
    rows = [
        (group, *pair)
        for group in groups
        for pair in zip(group.rollouts, group.outcomes, strict=True)
    ]
    metric = torch.tensor(
        [outcome.value if outcome.ok else 0.0 for *_, outcome in rows], dtype=torch.float64
    )
    if algorithm.dynamic_sampling.metric == "shaped_reward":
        metric = metric * algorithm.reward.scale + algorithm.reward.shift
        lengths = torch.tensor(
            [max(len(s.token_ids) for s in samples) for _, samples, _ in rows], dtype=torch.int64
        )
        metric += overlong_penalty(
            lengths, config.sampling.max_response_tokens, algorithm.reward.overlong
        )
    indices = torch.tensor([index[group.group_id] for group, *_ in rows], dtype=torch.int64)
    valid = torch.tensor(
        [o.ok and (g.greedy_outcome is None or g.greedy_outcome.ok) for g, _, o in rows],
        dtype=torch.bool,
    )
    metric, indices, valid = (tensor.to(mesh.device) for tensor in (metric, indices, valid))
    keeps = algorithm.dynamic_sampling.load_filter()
    sizes = (len(all_ids), valid, config.train.num_prompts_per_step)
    by_index = select_groups(metric, indices, *sizes, mesh.reduce, keeps)
    parts = (by_index.chosen, by_index.surplus, by_index.dropped)
    return Selection(*([all_ids[i] for i in part] for part in parts))


def refuse_another_batch(
    num_batches: int,
    groups: Sequence[RolloutGroup],
    selection: Selection,
    config: ExperimentConfig,
    mesh: Mesh,
) -> None:
    """Collective over data-parallel ranks. Raises RunStopped on every rank if the step has consumed
    all its batches, and too few of their groups have something to learn from."""
    options = config.algorithm.dynamic_sampling
    wanted = config.train.num_prompts_per_step
    assert options is not None
    if num_batches < options.max_num_gen_batches:
        return
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    num_groups = len(selection.chosen) + len(selection.surplus) + len(selection.dropped)
    counts = torch.tensor(
        [sum(outcome.ok for outcome in outcomes), len(outcomes)], device=mesh.device
    )
    scored, total = mesh.reduce(counts, "sum").tolist()
    raise RunStopped(
        f"dynamic sampling: {options.max_num_gen_batches} batches of {wanted} prompts "
        f"(algorithm.dynamic_sampling.max_num_gen_batches) gave {len(selection.chosen)} of "
        f"{wanted} groups; {len(selection.dropped)} of {num_groups} were dropped "
        f"({options.dropped}), and {total - scored} of {total} responses could not be scored. "
        "The prompts are too easy or too hard for this model: take others, raise "
        "train.group_size or max_num_gen_batches"
    )
