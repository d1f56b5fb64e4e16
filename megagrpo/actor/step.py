"""The passes of a training step: log-probabilities, hidden states of the reference, updates.

A loss closure returns a loss that is already divided by its global denominator, so gradients are
plain sums over micro-batches and ranks, whatever the layout.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from megagrpo.actor.head import Loss, TokenValues, gathered, over_tokens, with_draft
from megagrpo.actor.megatron_actor import MegatronActor, NonFiniteUpdate
from megagrpo.actor.schedule import from_context, from_last_stage, run_schedule, sum_over_ranks
from megagrpo.actor.timing import mfu
from megagrpo.algo.loss import (
    Denominators,
    LossInputs,
    candidate_gaps,
    count_denominators,
    count_streams,
    objective,
)
from megagrpo.algo.policy_loss import Rows
from megagrpo.algo.rollouts import TokenCounts, rollouts_of, to_samples, token_counts
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.models.body import Body
from megagrpo.models.table import training_flops
from megagrpo.types import Batch, MicroBatch, ReferenceStates, Streams, on_device

_COUNTS = ("updates", "padded", "real", "tokens")  # sums of a pass that are no metrics
# of an update, by its denominators; others are sums
DIVIDED = ("loss/", "router/", "draft/", "stream/")


def token_logprobs(actor: MegatronActor, batch: Batch, temperature: float) -> Tensor:
    """Collective. Returns log-probabilities [T] float32 of the sampled tokens under the live
    weights, 0 elsewhere.

    Every rank of a replica gets them, on the host.
    """
    return _forward_values(actor, batch, temperature)[0]


def _forward_values(
    actor: MegatronActor, batch: Batch, temperature: float, squares: bool = False
) -> Tensor:
    """Collective. Returns log-probabilities as token_logprobs, and below them the sums of squared
    probabilities if asked: [1 or 2, T]."""
    size = 1 + squares, len(batch.tokens)
    out = torch.full(size, torch.nan, device=actor.mesh.device)

    def token_loss(micro: MicroBatch, values: TokenValues) -> Loss:
        put_tokens(out[0], micro, values.logprobs)
        if squares:
            put_tokens(out[1], micro, values.squares())
        return values.logprobs.sum() * 0.0, {}

    every = range(len(batch.lengths))
    on_last_stage = over_tokens(actor, batch, temperature, token_loss)
    with torch.no_grad():
        run_schedule(actor, batch, every, on_last_stage, forward_only=True)
    out = from_last_stage(from_context(actor, out)).cpu()
    return torch.where(batch.trained_mask, out, 0.0)


class Updated(NamedTuple):
    """The measurements of one step's optimizer updates."""

    metrics: dict[str, float]  # equal on all ranks
    # [T] float32, of the policy before the step; NaN for tokens that no update trained on
    logprobs: Tensor


def put_tokens(out: Tensor, micro: MicroBatch, values: Tensor) -> None:
    """Writes the values of a micro-batch's trained tokens into those of all, `out` [T], on its
    device; waits for nothing."""
    out[on_device(micro.trained, out.device)] = values.detach()


def hidden_states(actor: MegatronActor, batch: Batch) -> ReferenceStates:
    """Collective. Returns the last hidden states [R, h] under the live weights and a copy of the
    output weight.

    R are the trained positions of this rank, on the last pipeline stage; 0 before it. The live
    weights are the reference's when it is swapped in.
    """
    # On the host: the states of a whole step would fill a GPU. In one piece, which takes memory only
    # where states are written: parts would be there twice when they are joined.
    size = int(batch.trained_mask.sum()), actor.arch.hidden_size
    states = torch.empty(size, dtype=actor.transformer.params_dtype)
    index = torch.full((len(batch.tokens),), -1)
    end = 0

    def keep(micro: MicroBatch, chunk: Body, hidden: Tensor) -> Loss:
        nonlocal end
        first = end
        end += len(micro.target_places)
        index[micro.target_places] = torch.arange(first, end)
        states[first:end] = gathered(actor, hidden)[micro.targets.flat]
        return hidden.sum() * 0.0, {}

    weight = None
    with torch.no_grad():
        run_schedule(actor, batch, range(len(batch.lengths)), keep, forward_only=True)
        if actor.on_last_stage:
            weight = actor.chunks[-1].output_weight().detach().clone()
    return ReferenceStates(states[:end], index, weight)


def with_logprobs(
    actor: MegatronActor, batch: Batch, algorithm: AlgorithmConfig, temperature: float
) -> Batch:
    """Collective. Returns the batch with the log-probabilities before the update that the algorithm
    and its number of updates ask for: the actor's, and the reference's or its hidden states.

    Raises NonFiniteUpdate on every rank if one of them is NaN or infinite: the weights cause it,
    and the update would fail too.
    """
    if algorithm.computes_old_logprobs(batch.num_updates):
        batch = with_old_logprobs(actor, batch, temperature, algorithm.advantage.needs_squares)
    if algorithm.uses_reference:
        batch = with_reference(actor, batch, algorithm.kl.estimator, temperature)
    return batch


def with_old_logprobs(
    actor: MegatronActor, batch: Batch, temperature: float, squares: bool = False
) -> Batch:
    """Collective. Returns the batch with old_logprobs, and squares if asked. Raises
    NonFiniteUpdate.

    With actor.routing_replay old, this forward records the experts for the updates.
    """
    if actor.routing is not None and actor.config.routing_replay == "old":
        with actor.routing.recording(batch) as recorded:
            found = _forward_values(actor, batch, temperature, squares)
        batch = recorded()
    else:
        found = _forward_values(actor, batch, temperature, squares)
    logprobs = _finite(actor, found, "the actor")[0]
    return replace(batch, old_logprobs=logprobs, squares=found[1] if squares else None)


def with_reference(actor: MegatronActor, batch: Batch, estimator: str, temperature: float) -> Batch:
    """Collective. Returns the batch with what this estimator of the KL takes of the reference.

    The reference is swapped in for its forward and routes by itself. Raises NonFiniteUpdate.
    """
    assert actor.as_reference is not None, "keep_reference() was not called"
    unreplayed = replace(batch, routing=None)
    with actor.as_reference():
        if estimator == "full":
            return replace(batch, reference=hidden_states(actor, unreplayed))
        logprobs = token_logprobs(actor, unreplayed, temperature)
        return replace(batch, ref_logprobs=_finite(actor, logprobs, "the reference"))


def _finite(actor: MegatronActor, logprobs: Tensor, whose: str) -> Tensor:
    if not actor.mesh.all_true(bool(logprobs.isfinite().all())):
        raise NonFiniteUpdate(
            f"log-probabilities of {whose} are not finite before the update: no weight was changed"
        )
    return logprobs


def update(
    actor: MegatronActor,
    batch: Batch,
    algorithm: AlgorithmConfig,
    temperature: float,
    max_response_tokens: int,
) -> Updated:
    """Collective. Makes the optimizer updates of `batch.updates`; returns metrics and, if the batch
    has no old_logprobs, the log-probabilities of the forwards until weights change (complete where
    `holds_token_values`; NaN for what they did not see).

    With several passes every metric is also reported per pass, NAME_pass_1 and so on. An update
    whose loss or gradient is not finite changes no weight; optim/non_finite_updates counts it.
    Raises ValueError if Batch.updates is empty.
    """
    if not batch.updates:
        raise ValueError("the batch has no updates: Batch.updates is empty")
    passes: list[list[dict[str, float]]] = []  # sums over all ranks of every update
    # log-probabilities
    seen = torch.full((len(batch.tokens),), torch.nan, device=actor.mesh.device)
    skipped, non_finite = 0, 0
    optim: list[dict[str, float]] = []  # of every update
    actor.expert_load.begin()
    actor.clock.clear()
    computed: list[int] = []  # rows of every update that is not skipped
    counts = token_counts(batch)
    for updates in batch.updates:
        passes.append([])
        for groups in updates:
            rows = _rows(batch, groups)
            denominators = denominators_of(
                actor, batch, rows, algorithm, max_response_tokens, counts
            )
            if denominators.nothing:
                skipped += 1
                continue
            computed += rows
            recorded = None if optim or batch.old_logprobs is not None else seen
            sums = backward(actor, batch, rows, algorithm, temperature, denominators, recorded)
            try:
                optim.append(actor.optimizer_step(sums["loss/total"], followed=True))
            except NonFiniteUpdate as exc:
                print(exc, flush=True)
                non_finite += 1
                continue
            passes[-1].append({"updates": 1.0, **sums})
    actor.gather_parameters()
    pass_sums = list(map(_added, passes))
    whole = _added(pass_sums)
    padded, real = whole.get("padded", 1.0), whole.get("real", 1.0)
    metrics = {
        "loss/total": 0.0,
        **_means(whole),
        "batch/padding_waste": 1 - real / padded,
        **_optimizer_metrics(optim),
        "optim/skipped_updates": float(skipped),
        "optim/non_finite_updates": float(non_finite),
    }
    if len(passes) > 1:
        means = map(_means, pass_sums)
        metrics |= {
            f"{name}_pass_{n}": value
            for n, values in enumerate(means, 1)
            for name, value in values.items()
        }
    metrics |= actor.clock.take() | _expert_metrics(actor) | _utilization(actor, batch, computed)
    return Updated(metrics, seen.cpu() if batch.old_logprobs is None else batch.old_logprobs)


def _rows(batch: Batch, groups: Sequence[int]) -> list[int]:
    """Returns this replica's samples of an update."""
    return torch.isin(batch.group_ids, torch.tensor(groups)).nonzero()[:, 0].tolist()


def _optimizer_metrics(optim: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the last learning rate, and of every gradient norm the mean and the largest of the
    updates."""
    metrics = dict(optim[-1]) if optim else {}
    for name in [name for name in metrics if name.endswith("grad_norm")]:
        norms = [update[name] for update in optim]
        metrics[name] = sum(norms) / len(norms)
        metrics[f"{name}_max"] = max(norms)
    return metrics


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the sum of the values of each name."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns losses of an update, which are divided already, and everything else of a token
    trained on."""
    updates, tokens = (max(sums.get(name, 1.0), 1.0) for name in ("updates", "tokens"))
    return {
        name: value / (updates if name.startswith(DIVIDED) else tokens)
        for name, value in sums.items()
        if name not in _COUNTS
    }


def denominators_of(
    actor: MegatronActor,
    batch: Batch,
    rows: Sequence[int],
    algorithm: AlgorithmConfig,
    max_response_tokens: int,
    counts: TokenCounts | None = None,
) -> Denominators:
    """Collective over data-parallel ranks. Counts what the loss of these rows' update is divided
    by. counts: of the batch, if they are made already; no update changes them."""
    counts = counts or token_counts(batch)
    samples = torch.tensor(rows, dtype=torch.int64)
    scale = algorithm.loss_scale_factor or max_response_tokens
    of_rows = counts.rollouts[rollouts_of(samples, batch)]
    return replace(
        count_denominators(of_rows, actor.mesh.reduce, scale),
        stream_tokens=count_streams(counts.streams, samples, actor.mesh.reduce),
        counted=counts.rollouts,
    )


def backward(
    actor: MegatronActor,
    batch: Batch,
    rows: Sequence[int],
    algorithm: AlgorithmConfig,
    temperature: float,
    denominators: Denominators,
    seen: Tensor | None = None,
) -> dict[str, float]:
    """Collective. Sums one update's gradients into the main gradients; returns metric sums over all
    ranks.

    seen: [T] float32, receives the log-probabilities of the forward, on last pipeline stages.
    """

    def token_loss(micro: MicroBatch, values: TokenValues) -> Loss:
        if seen is not None:
            put_tokens(seen, micro, values.logprobs)
        inputs = _loss_inputs(batch, micro, values, counted, by_engine)
        if (found := values.candidates) is not None:
            assert algorithm.distillation is not None
            gaps = candidate_gaps(found.logprobs, found.teacher, algorithm.distillation)
            inputs = replace(inputs, candidate_gaps=found.spread(gaps))
        loss, sums = objective(inputs, algorithm, denominators)
        return loss, {"loss/total": loss.detach(), **sums}

    assert denominators.counted is not None
    counted = to_samples(denominators.counted, batch)
    by_engine = algorithm.old_logprobs == "engine"
    actor.zero_grad()
    model_loss = over_tokens(actor, batch, temperature, token_loss, with_candidates=True)
    on_last_stage = with_draft(actor, model_loss, temperature, denominators.num_tokens)
    sums = run_schedule(actor, batch, rows, on_last_stage, forward_only=False)
    if seen is not None:
        seen.copy_(from_context(actor, seen))
    stream_tokens = denominators.stream_tokens.items()
    tokens = {f"stream/{name}_tokens": float(number) for name, number in stream_tokens}
    return sum_over_ranks(actor, sums) | tokens


def _loss_inputs(
    batch: Batch, micro: MicroBatch, values: TokenValues, counted: Tensor, by_engine: bool
) -> LossInputs:
    def mine(field: Tensor | None) -> Tensor | None:
        return None if field is None else micro.at_trained(field)

    assert batch.advantages is not None, "with_advantages() comes before the update"
    rollout = micro.at_trained(batch.rollout_logprobs)
    if batch.old_logprobs is not None:
        old = micro.at_trained(batch.old_logprobs)
    elif by_engine:
        old = rollout
    else:  # one update a step: the policy before it is the one being differentiated, bit for bit
        old = values.logprobs.detach()
    streams = batch.streams or Streams({})
    return LossInputs(
        logprobs=values.logprobs,
        entropy=values.entropy,
        loss_mask=micro.at_trained(batch.loss_mask),
        advantages=micro.at_trained(batch.advantages),
        old_logprobs=old,
        rollout_logprobs=rollout,
        rows=Rows(micro.num_trained),
        ref_logprobs=mine(batch.ref_logprobs),
        chosen=mine(batch.chosen),
        full_kl=values.full_kl,
        policy_weights=mine(batch.correction.weights),
        counted_tokens=on_device(counted[micro.members], values.logprobs.device),
        weights={name: micro.at_trained(each) for name, each in streams.weights.items()},
        teacher_logprobs=mine(streams.teacher_logprobs),
    )


def holds_token_values() -> bool:
    """Tells whether this rank is the one of its replica that records what the update computed of
    every token."""
    first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    return first and mpu.is_pipeline_last_stage(ignore_virtual=True)


def _utilization(actor: MegatronActor, batch: Batch, rows: Sequence[int]) -> dict[str, float]:
    """Collective. Returns perf/mfu of the updates that the clock took last, of these rows."""
    config = actor.config
    lengths = batch.lengths[list(rows)].tolist()
    own = training_flops(actor.arch, lengths, config.lora is not None)
    flops = actor.mesh.reduce(torch.tensor(own, dtype=torch.float64), "sum")
    width = 2 if config.dtype == "bfloat16" else 4
    return mfu(float(flops), actor.clock.seconds, config.world_size, width, actor.mesh.device)


def _expert_metrics(actor: MegatronActor) -> dict[str, float]:
    """Collective. Returns the largest expert load over the mean, averaged over layers.

    1 is balanced; num_experts / experts_per_token says that all tokens took the same experts.
    """
    if not actor.arch.is_moe:
        return {}
    counts = actor.expert_load.counts.clone()
    dist.all_reduce(counts)
    load = counts.cpu()[actor.arch.routed_layers].double()  # an index would be copied to the device
    return {"moe/load_imbalance": float((load.amax(1) / load.mean(1).clamp(min=1e-9)).mean())}
