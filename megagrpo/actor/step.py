"""Forward and backward over micro-batches: Megatron's schedule with our head and our losses.

A loss closure returns a loss that is already divided by its global denominator, so gradients are plain sums over
micro-batches and ranks, whatever the layout.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megagrpo.actor.attention import PackedSequences
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.algo.logprob import chunked_logprobs
from megagrpo.algo.loss import Denominators, LossInputs, count_denominators, objective
from megagrpo.config_algorithm import AlgorithmConfig
from megagrpo.microbatch import plan, targets
from megagrpo.schedule import update_of_group
from megagrpo.types import Batch, MicroBatch

_TP_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict]]


def token_logprobs(actor: MegatronActor, batch: Batch, temperature: float) -> Tensor:
    """Log-probabilities [N, S] float32 of the sampled tokens under the live weights, on every rank of the replica; 0 elsewhere."""
    out = torch.zeros_like(batch.rollout_logprobs)

    def head(members, logprobs, entropy):
        out[members] = logprobs
        return logprobs.sum() * 0.0, {}

    with torch.no_grad():
        _run(actor, batch, range(len(batch.tokens)), temperature, head, forward_only=True)
    return _from_last_stage(out)


def with_logprobs(actor: MegatronActor, batch: Batch, temperature: float, old: bool, reference: bool) -> Batch:
    """The batch with old_logprobs and ref_logprobs as asked; the reference is swapped in for its forward."""
    if old:
        batch = replace(batch, old_logprobs=token_logprobs(actor, batch, temperature))
    if reference:
        assert actor.reference is not None, "keep_reference() was not called"
        with actor.reference.swapped_in():
            batch = replace(batch, ref_logprobs=token_logprobs(actor, batch, temperature))
    return batch


def update(
    actor: MegatronActor, batch: Batch, algorithm: AlgorithmConfig, temperature: float, max_response_tokens: int, num_updates: int
) -> dict[str, float]:
    """Train on the batch in `num_updates` optimiser updates; returns the step's metrics, the same on every rank.

    Raises megatron_actor.NonFiniteGradient on every rank before any weight of that update is touched.
    """
    totals: dict[str, float] = {}
    tokens, skipped, optim = 0.0, 0, {}
    actor.expert_load.enabled = True
    for index in range(num_updates):
        rows = [r for r, g in enumerate(batch.group_ids.tolist()) if update_of_group(g, batch.num_groups, num_updates) == index]
        denominators = denominators_of(actor, batch, rows, algorithm, max_response_tokens)
        if denominators.num_tokens == 0:
            skipped += 1
            continue
        sums = backward(actor, batch, rows, algorithm, temperature, denominators)
        optim = actor.optimizer_step()
        tokens += float(denominators.num_tokens)
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value
    actor.expert_load.enabled = False
    loss = totals.pop("loss/total", 0.0) / max(num_updates - skipped, 1)
    padded, real = totals.pop("padded", 1.0), totals.pop("real", 1.0)
    metrics = {name: value / max(tokens, 1.0) for name, value in totals.items()}
    metrics |= {"loss/total": loss, "batch/padding_waste": 1 - real / padded, "optim/skipped_updates": float(skipped), **optim}
    return metrics | _expert_metrics(actor)


def denominators_of(
    actor: MegatronActor, batch: Batch, rows: Sequence[int], algorithm: AlgorithmConfig, max_response_tokens: int
) -> Denominators:
    """What the loss of these rows' update is divided by, counted over all data-parallel ranks. Collective over them."""
    counted = batch.loss_mask if batch.denominator_mask is None else batch.denominator_mask
    return count_denominators(counted[rows], actor.mesh.reduce, scale=algorithm.loss_scale_factor or max_response_tokens)


def backward(
    actor: MegatronActor, batch: Batch, rows: Sequence[int], algorithm: AlgorithmConfig, temperature: float, denominators: Denominators
) -> dict[str, float]:
    """Gradients of one update's loss, summed over all ranks into the main gradients; returns metric sums over all ranks."""

    def head(members, logprobs, entropy):
        loss, sums = objective(_loss_inputs(batch, members, logprobs, entropy), algorithm, denominators)
        return loss, {"loss/total": loss.detach(), **sums}

    actor.zero_grad()
    collected = _run(actor, batch, rows, temperature, head, forward_only=False)
    return _sum_over_ranks(actor, collected)


def likelihood_step(actor: MegatronActor, batch: Batch) -> dict[str, float]:
    """One supervised update: minus the mean log-probability of the tokens in the loss mask, over all ranks."""
    num_tokens = actor.mesh.reduce(batch.loss_mask.sum().double(), "sum")

    def head(members, logprobs, entropy):
        loss = -logprobs.sum() / num_tokens.to(logprobs.dtype)
        return loss, {"loss/total": loss.detach()}

    actor.zero_grad()
    sums = _sum_over_ranks(actor, _run(actor, batch, range(len(batch.tokens)), 1.0, head, forward_only=False))
    return {"loss/total": sums["loss/total"], **actor.optimizer_step()}


def _loss_inputs(batch: Batch, members: Tensor, logprobs: Tensor, entropy: Tensor) -> LossInputs:
    def of_members(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[members]

    return LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        loss_mask=batch.loss_mask[members],
        advantages=batch.advantages[members],
        # one update a step: the policy before the update is the one being differentiated, bit for bit
        old_logprobs=logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[members],
        rollout_logprobs=batch.rollout_logprobs[members],
        ref_logprobs=of_members(batch.ref_logprobs),
        policy_weights=of_members(batch.policy_weights),
    )


def _run(actor: MegatronActor, batch: Batch, rows: Sequence[int], temperature: float, head: Head, forward_only: bool) -> list[dict]:
    """Megatron's schedule over the micro-batches of `rows`; on the last stage `head` sees each one's sampled tokens.

    head(members [n], logprobs [n, S], entropy [n, S]) -> (scalar loss, metric sums); 0 off the loss mask, gradients attached.
    """
    config, device = actor.config, actor.mesh.device
    layout, cp_rank = config.parallel, mpu.get_context_parallel_rank()
    micros = plan(batch, rows, config.micro_batch_tokens, config.packing, layout, actor.mesh, cp_rank)
    counts = {
        "padded": torch.tensor(float(sum(m.tokens.numel() for m in micros) * layout.cp), device=device),
        "real": batch.lengths[list(rows)].sum(),
    }

    def loss(micro: MicroBatch, chunk, hidden: Tensor):
        flat, grid_rows, columns = targets(micro, batch)
        by_token = _head(actor, chunk, hidden, flat, batch.tokens[grid_rows, columns], temperature)
        at = (torch.searchsorted(micro.members, grid_rows), columns)
        shape = (len(micro.members), batch.tokens.shape[1])
        logprobs, entropy = (_all_context_ranks(values.new_zeros(shape).index_put(at, values)) for values in by_token)
        value, sums = head(micro.members, logprobs, entropy)
        return value, torch.tensor(0, dtype=torch.int, device=device), sums  # 0 tokens: Megatron divides by nothing

    def forward_step(iterator, model):
        micro = next(iterator)
        packed = None if micro.cu_seqlens is None else PackedSequences.make(micro.cu_seqlens, micro.max_seqlen)
        hidden = model(micro.tokens, micro.positions, None, packed_seq_params=packed)
        return hidden, partial(loss, micro, model.module)

    iterators = [iter(micros) for _ in actor.model]
    collected = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=actor.model if len(actor.model) > 1 else actor.model[0],
        num_microbatches=len(micros),
        seq_length=micros[0].tokens.shape[1],
        micro_batch_size=micros[0].tokens.shape[0],
        forward_only=forward_only,
    )
    return [*collected, counts] if mpu.is_pipeline_last_stage(ignore_virtual=True) else []


def _head(actor: MegatronActor, chunk, hidden: Tensor, flat: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Hidden states [s / tp, b, h] to log-probability and entropy [T] of `tokens` at the flat positions of [b, s]."""
    reduce = None
    if actor.config.parallel.tp > 1:
        # the gradient of this gather is a reduce-scatter: it sums the vocabulary shards' partial gradients
        hidden = gather_from_sequence_parallel_region(hidden)
        group = mpu.get_tensor_model_parallel_group()

        def reduce(tensor: Tensor, op: str) -> Tensor:
            dist.all_reduce(tensor, op=_TP_OPS[op], group=group)
            return tensor

    weight = chunk.output_weight()
    return chunked_logprobs(
        hidden.transpose(0, 1).flatten(0, 1)[flat],
        weight,
        tokens,
        temperature,
        actor.config.logprob_chunk_tokens,
        mpu.get_tensor_model_parallel_rank() * weight.shape[0],
        actor.arch.vocab_size,
        reduce,
    )


def _all_context_ranks(grid: Tensor) -> Tensor:
    """Values of all context-parallel ranks' tokens; only this rank's carry a gradient, and Megatron sums gradients over them."""
    if mpu.get_context_parallel_world_size() == 1:
        return grid
    total = grid.detach().clone()
    dist.all_reduce(total, group=mpu.get_context_parallel_group())
    return grid + (total - grid.detach())


def _from_last_stage(tensor: Tensor) -> Tensor:
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(tensor, src=mpu.get_pipeline_model_parallel_last_rank(), group=mpu.get_pipeline_model_parallel_group())
    return tensor


def _sum_over_ranks(actor: MegatronActor, collected: list[dict]) -> dict[str, float]:
    """Sums over micro-batches, then data-parallel ranks, in float64; every rank gets the last stage's."""
    names = sorted({name for sums in collected for name in sums})
    box = [names]
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast_object_list(box, src=mpu.get_pipeline_model_parallel_last_rank(), group=mpu.get_pipeline_model_parallel_group())
    names = box[0]
    values = torch.zeros(len(names), dtype=torch.float64, device=actor.mesh.device)
    for sums in collected:
        for i, name in enumerate(names):
            values[i] += sums[name].double() if name in sums else 0.0
    values = actor.mesh.reduce(_from_last_stage(values), "sum")
    return dict(zip(names, values.tolist(), strict=True))


def _expert_metrics(actor: MegatronActor) -> dict[str, float]:
    """Largest expert load over the mean, averaged over layers: 1 is balanced, num_experts / top-k is one expert for all."""
    if not actor.arch.is_moe:
        return {}
    counts = actor.expert_load.take().to(actor.mesh.device)
    if actor.mesh.world_size > 1:
        dist.all_reduce(counts)
    load = counts.double()
    return {"moe/load_imbalance": float((load.amax(1) / load.mean(1).clamp(min=1e-9)).mean())}
