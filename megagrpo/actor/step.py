"""Runs forward and backward over micro-batches: Megatron's schedule with our head and our losses.

A loss closure returns a loss that is already divided by its global denominator, so gradients are
plain sums over micro-batches and ranks, whatever the layout.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megagrpo.actor.head import LastStage, Loss, TokenValues, gathered, over_tokens, with_draft
from megagrpo.actor.layers.attention import PackedSequences
from megagrpo.actor.layers.draft import following
from megagrpo.actor.megatron.model import HiddenStatesModel
from megagrpo.actor.megatron.vision import Sight
from megagrpo.actor.megatron_actor import MegatronActor, NonFiniteUpdate
from megagrpo.actor.routing.tokens import MicroBatchScope
from megagrpo.algo.loss import Denominators, LossInputs, count_denominators, objective
from megagrpo.algo.rollouts import counted_tokens, of_samples, rollouts_of
from megagrpo.batching.microbatch import MicroBatches, MicroBatchSize, plan_micro_batches
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.types import Batch, MicroBatch, ReferenceStates, on_device

# what the blocks of MXFP8 divide the rows of a product into; other recipes ask for 16 or less
_FP8_ROWS = 32


def token_logprobs(actor: MegatronActor, batch: Batch, temperature: float) -> Tensor:
    """Collective. Returns log-probabilities [T] float32 of the sampled tokens under the live
    weights, 0 elsewhere.

    Every rank of a replica gets them, on the host.
    """
    out = torch.zeros(len(batch.tokens), device=actor.mesh.device)

    def token_loss(micro: MicroBatch, values: TokenValues) -> Loss:
        put_tokens(out, micro, values.logprobs)
        return values.logprobs.sum() * 0.0, {}

    every, on_last_stage = (
        range(len(batch.lengths)),
        over_tokens(actor, batch, temperature, token_loss),
    )
    with torch.no_grad():
        _run(actor, batch, every, on_last_stage, forward_only=True)
    return _from_last_stage(out).cpu()


class Updated(NamedTuple):
    """The measurements of one step's optimiser updates."""

    metrics: dict[str, float]  # equal on all ranks
    # [T] float32, of the policy before the step; NaN for samples that no update trained on
    logprobs: Tensor


def put_tokens(out: Tensor, micro: MicroBatch, values: Tensor) -> None:
    """Writes a micro-batch's values [n, S] into those of all tokens, `out` [T], on its device;
    waits for nothing."""
    out[on_device(micro.places, out.device)] = values.detach().flatten()[micro.grid]


def hidden_states(actor: MegatronActor, batch: Batch) -> ReferenceStates:
    """Collective. Returns the last hidden states [R, h] under the live weights and a copy of the
    output weight.

    R are the trained positions of this rank, on the last pipeline stage; 0 before it. The live
    weights are the reference's when it is swapped in.
    """
    parts: list[Tensor] = []
    index = torch.full((len(batch.tokens),), -1, device=actor.mesh.device)

    def keep(micro: MicroBatch, chunk: HiddenStatesModel, hidden: Tensor) -> Loss:
        flat, seen = micro.targets.flat, sum(len(part) for part in parts)
        grid = torch.full((len(micro.members) * micro.longest,), -1, device=flat.device)
        rows = seen + torch.arange(len(flat), device=flat.device)
        put_tokens(index, micro, grid.index_put((micro.target_grid,), rows))
        parts.append(gathered(actor, hidden)[flat].clone())
        return hidden.sum() * 0.0, {}

    with torch.no_grad():
        _run(actor, batch, range(len(batch.lengths)), keep, forward_only=True)
        if not parts:  # an earlier pipeline stage
            nothing = torch.empty(0, actor.arch.hidden_size, device=actor.mesh.device)
            return ReferenceStates(hidden=nothing, index=index.cpu(), output_weight=None)
        weight = actor.chunks[-1].output_weight().detach().clone()
        return ReferenceStates(hidden=torch.cat(parts), index=index.cpu(), output_weight=weight)


def with_logprobs(
    actor: MegatronActor, batch: Batch, temperature: float, old: bool, reference: str | None
) -> Batch:
    """Collective. Returns the batch with old_logprobs if `old`, and with the inputs of the KL
    estimator `reference`.

    With actor.routing_replay old, the forward of the old log-probabilities records the experts for
    the updates. The reference is swapped in for its forward and routes by itself. Raises
    NonFiniteUpdate on every rank if one of them is NaN or infinite: the weights cause it, and the
    update would fail too.
    """
    if old and actor.routing is not None and actor.config.routing_replay == "old":
        with actor.routing.recording(batch) as recorded:
            logprobs = token_logprobs(actor, batch, temperature)
        batch = replace(recorded(), old_logprobs=_finite(actor, logprobs, "the actor"))
    elif old:
        batch = replace(
            batch,
            old_logprobs=_finite(actor, token_logprobs(actor, batch, temperature), "the actor"),
        )
    if reference is not None:
        assert actor.as_reference is not None, "keep_reference() was not called"
        of_itself = replace(batch, routing=None)
        with actor.as_reference():
            if reference == "full":
                return replace(batch, reference=hidden_states(actor, of_itself))
            logprobs = _finite(
                actor, token_logprobs(actor, of_itself, temperature), "the reference"
            )
            batch = replace(batch, ref_logprobs=logprobs)
    return batch


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
    """Collective. Makes the optimiser updates of `batch.updates`; returns metrics and, if the batch
    has no old_logprobs, the log-probabilities of the update's own forward (complete where
    `holds_token_values`).

    With several passes every metric is also reported per pass, NAME_pass_1 and so on. An update
    whose loss or gradient is not finite changes no weight; optim/non_finite_updates counts it.
    Raises ValueError if Batch.updates is empty.
    """
    if not batch.updates:
        raise ValueError("the batch has no updates: Batch.updates is empty")
    passes: list[list[dict[str, float]]] = []  # sums over all ranks of every update
    seen = torch.full(
        (len(batch.tokens),), torch.nan, device=actor.mesh.device
    )  # log-probabilities
    skipped, non_finite = 0, 0
    optim: dict[str, float] = {}
    actor.expert_load.begin()
    actor.clock.clear()
    group_ids = batch.group_ids.tolist()
    for updates in batch.updates:
        passes.append([])
        for groups in map(frozenset, updates):
            rows = [row for row, group in enumerate(group_ids) if group in groups]
            denominators = denominators_of(actor, batch, rows, algorithm, max_response_tokens)
            if denominators.num_tokens == 0:
                skipped += 1
                continue
            of_update = seen if batch.old_logprobs is None else None
            sums = backward(actor, batch, rows, algorithm, temperature, denominators, of_update)
            try:
                optim = actor.optimizer_step(sums["loss/total"], followed=True)
            except NonFiniteUpdate as exc:
                print(exc, flush=True)
                non_finite += 1
                continue
            passes[-1].append({"updates": 1.0, **sums})
    actor.gather_parameters()
    of_passes = list(map(_added, passes))
    whole = _added(of_passes)
    padded, real = whole.get("padded", 1.0), whole.get("real", 1.0)
    metrics = {
        "loss/total": 0.0,
        **_means(whole),
        "batch/padding_waste": 1 - real / padded,
        **optim,
    }
    if len(passes) > 1:
        means = map(_means, of_passes)
        metrics |= {
            f"{name}_pass_{n}": value for n, of in enumerate(means, 1) for name, value in of.items()
        }
    metrics |= {
        "optim/skipped_updates": float(skipped),
        "optim/non_finite_updates": float(non_finite),
    }
    metrics |= actor.clock.take() | _expert_metrics(actor)
    return Updated(metrics, seen.cpu() if batch.old_logprobs is None else batch.old_logprobs)


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
    counts, divided = ("updates", "padded", "real", "tokens"), ("loss/", "router/", "draft/")
    updates, tokens = (max(sums.get(name, 1.0), 1.0) for name in ("updates", "tokens"))
    return {
        name: value / (updates if name.startswith(divided) else tokens)
        for name, value in sums.items()
        if name not in counts
    }


def denominators_of(
    actor: MegatronActor,
    batch: Batch,
    rows: Sequence[int],
    algorithm: AlgorithmConfig,
    max_response_tokens: int,
) -> Denominators:
    """Collective over data-parallel ranks. Counts what the loss of these rows' update is divided
    by."""
    counts = counted_tokens(batch)[rollouts_of(torch.tensor(rows, dtype=torch.int64), batch)]
    return count_denominators(
        counts, actor.mesh.reduce, scale=algorithm.loss_scale_factor or max_response_tokens
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
        loss, sums = objective(_loss_inputs(batch, micro, values, counted), algorithm, denominators)
        return loss, {"loss/total": loss.detach(), **sums}

    counted = of_samples(counted_tokens(batch), batch)
    actor.zero_grad()
    of_model = over_tokens(actor, batch, temperature, token_loss)
    on_last_stage = with_draft(actor, of_model, temperature, denominators.num_tokens)
    return _sum_over_ranks(actor, _run(actor, batch, rows, on_last_stage, forward_only=False))


def likelihood_step(actor: MegatronActor, batch: Batch) -> dict[str, float]:
    """Collective. Makes one supervised update: minus the mean log-probability over the loss mask is
    the loss."""
    num_tokens = actor.mesh.reduce(batch.loss_mask.sum(), "sum")

    def token_loss(micro: MicroBatch, values: TokenValues) -> Loss:
        loss = -values.logprobs.sum() / num_tokens.to(values.logprobs.dtype)
        return loss, {"loss/total": loss.detach()}

    actor.zero_grad()
    actor.clock.clear()
    every = range(len(batch.lengths))
    on_last_stage = with_draft(actor, over_tokens(actor, batch, 1.0, token_loss), 1.0, num_tokens)
    sums = _sum_over_ranks(actor, _run(actor, batch, every, on_last_stage, forward_only=False))
    wanted = {
        name: value
        for name, value in sums.items()
        if name.startswith(("loss/", "router/", "draft/"))
    }
    return {**wanted, **actor.optimizer_step(sums["loss/total"]), **actor.clock.take()}


def _loss_inputs(
    batch: Batch, micro: MicroBatch, values: TokenValues, counted: Tensor
) -> LossInputs:
    def padded(field: Tensor | None) -> Tensor | None:
        return None if field is None else micro.padded(field)

    assert batch.advantages is not None, "with_advantages() comes before the update"
    return LossInputs(
        logprobs=values.logprobs,
        entropy=values.entropy,
        loss_mask=micro.padded(batch.loss_mask),
        advantages=micro.padded(batch.advantages),
        # one update a step: the policy before the update is the one being differentiated, bit for
        # bit
        old_logprobs=values.logprobs.detach()
        if batch.old_logprobs is None
        else micro.padded(batch.old_logprobs),
        rollout_logprobs=micro.padded(batch.rollout_logprobs),
        ref_logprobs=padded(batch.ref_logprobs),
        full_kl=values.full_kl,
        policy_weights=padded(batch.correction.weights),
        counted_tokens=on_device(counted[micro.members], values.logprobs.device),
    )


def micro_batches(actor: MegatronActor, batch: Batch, rows: Sequence[int]) -> MicroBatches:
    """Collective over data-parallel ranks. Cuts `rows` into the micro-batches of the experiment,
    always the same."""
    config, cp_rank = actor.config, mpu.get_context_parallel_rank()
    multiple, vision = _FP8_ROWS if actor.transformer.fp8 else 1, actor.arch.vision
    size = MicroBatchSize(
        config.micro_batch_tokens, config.packing, multiple, vision.merge if vision else 0
    )
    return plan_micro_batches(batch, rows, size, config.parallel, actor.mesh, cp_rank)


def _run(
    actor: MegatronActor,
    batch: Batch,
    rows: Sequence[int],
    on_last_stage: LastStage,
    forward_only: bool,
) -> list[dict[str, Tensor]]:
    """Runs Megatron's schedule over the micro-batches of `rows`; returns the last stage's metric
    sums, [] elsewhere."""
    device = actor.mesh.device
    micros = micro_batches(actor, batch, rows)
    lengths = batch.lengths.tolist()
    real = sum(lengths[row] for row in rows)
    padded = sum(height * width for height, width in micros.shapes)
    counts = {
        name: torch.full((), float(count), dtype=torch.float64, device=device)
        for name, count in (("padded", padded), ("real", real))
    }

    def loss(
        micro: MicroBatch, chunk: HiddenStatesModel, hidden: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        value, sums = on_last_stage(micro, chunk, hidden)
        none = torch.zeros(
            (), dtype=torch.int, device=device
        )  # 0 tokens: Megatron divides by nothing
        return value, none, sums

    def forward_step(iterator: Iterator[MicroBatch], model):
        micro = next(iterator).to(device)
        packed = (
            None
            if micro.cu_seqlens is None
            else PackedSequences.make(micro.cu_seqlens, micro.max_seqlen)
        )
        drafts = not forward_only and actor.config.trains_draft and model.module.post_process
        with actor.router_scope.of(MicroBatchScope(micro, batch, forward_only)):
            more: dict[str, object] = {"following": following(micro)} if drafts else {}
            if actor.arch.vision is not None:
                more["sight"] = Sight(actor.arch, actor.images, micro)
            hidden = model(micro.tokens, micro.positions, None, packed_seq_params=packed, **more)
        return hidden, partial(loss, micro, model.module)

    if not forward_only and actor.config.trains_draft:
        actor.bring_embedding()
    actor.router_scope.begin()
    if actor.router_losses is not None and not forward_only:
        actor.router_losses.begin(
            *actor.mesh.reduce(torch.tensor([len(rows), real]), "sum").tolist()
        )
    if actor.routing is not None:
        actor.routing.begin()
    iterators = [iter(micros) for _ in actor.model]
    collected = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=actor.model if len(actor.model) > 1 else actor.model[0],
        num_microbatches=len(micros),
        # of the whole; Megatron divides by cp and tp for what a stage receives
        seq_length=micros.shapes[0][1],
        micro_batch_size=micros.shapes[0][0],
        forward_only=forward_only,
    )
    return [*collected, counts] if mpu.is_pipeline_last_stage(ignore_virtual=True) else []


def holds_token_values() -> bool:
    """Tells whether this rank is the one of its replica that records what the update computed of
    every token."""
    first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    return first and mpu.is_pipeline_last_stage(ignore_virtual=True)


def _from_last_stage(tensor: Tensor) -> Tensor:
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            tensor,
            src=mpu.get_pipeline_model_parallel_last_rank(),
            group=mpu.get_pipeline_model_parallel_group(),
        )
    return tensor


def _sum_over_ranks(actor: MegatronActor, collected: list[dict[str, Tensor]]) -> dict[str, float]:
    """Collective. Sums over micro-batches, then data-parallel ranks, in float64; every rank gets
    the last stage's."""
    names = sorted({name for sums in collected for name in sums})
    box = [names]
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast_object_list(
            box,
            src=mpu.get_pipeline_model_parallel_last_rank(),
            group=mpu.get_pipeline_model_parallel_group(),
        )
    names = box[0]
    values = torch.zeros(len(names), dtype=torch.float64, device=actor.mesh.device)
    for sums in collected:
        for i, name in enumerate(names):
            values[i] += sums[name].double() if name in sums else 0.0
    values = actor.mesh.reduce(_from_last_stage(values), "sum")
    router = {} if actor.router_losses is None else actor.router_losses.take()
    router |= {} if actor.routing is None else actor.routing.take()
    return {**dict(zip(names, values.tolist(), strict=True)), **router}


def _expert_metrics(actor: MegatronActor) -> dict[str, float]:
    """Collective. Returns the largest expert load over the mean, averaged over layers.

    1 is balanced; num_experts / experts_per_token says that all tokens took the same experts.
    """
    if not actor.arch.is_moe:
        return {}
    counts = actor.expert_load.counts.clone()
    dist.all_reduce(counts)
    load = counts[actor.arch.dense_layers :].double()
    return {"moe/load_imbalance": float((load.amax(1) / load.mean(1).clamp(min=1e-9)).mean())}
