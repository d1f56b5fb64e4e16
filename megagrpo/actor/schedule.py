"""Megatron's schedule over micro-batches, with our head: one run of all of a rank's samples."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megagrpo.actor.head import LastStage
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.routing.tokens import MicroBatchScope
from megagrpo.batching.microbatch import MicroBatches, MicroBatchSize, plan_micro_batches
from megagrpo.models.body import Body
from megagrpo.models.kinds.draft.layer import following
from megagrpo.models.kinds.grouped_query.layer import PackedSequences
from megagrpo.models.kinds.vision.layer import Sight
from megagrpo.models.table import attention_length
from megagrpo.types import Batch, MicroBatch

# what the blocks of MXFP8 divide the rows of a product into; other recipes ask for 16 or less
_FP8_ROWS = 32


def micro_batches(actor: MegatronActor, batch: Batch, rows: Sequence[int]) -> MicroBatches:
    """Collective over data-parallel ranks. Cuts `rows` into the micro-batches of the experiment,
    always the same."""
    config = actor.config
    vision = actor.arch.vision
    size = MicroBatchSize(
        config.micro_batch_tokens,
        config.packing,
        multiple=_FP8_ROWS if actor.transformer.fp8 else 1,
        merge=vision.merge if vision else 0,
        attention_length=attention_length(actor.arch),
    )
    cp_rank = mpu.get_context_parallel_rank()
    return plan_micro_batches(batch, rows, size, config.parallel, actor.mesh, cp_rank)


def run_schedule(
    actor: MegatronActor,
    batch: Batch,
    rows: Sequence[int],
    on_last_stage: LastStage,
    forward_only: bool,
) -> list[dict[str, Tensor]]:
    """Collective. Runs a forward, and a backward unless `forward_only`, of the samples `rows`.

    Returns the metric sums of each micro-batch and the numbers of tokens, padded and real; [] but
    on last pipeline stages.
    """
    micros = micro_batches(actor, batch, rows)
    padded = sum(height * width for height, width in micros.shapes)
    real = int(batch.lengths[list(rows)].sum())
    _begin(actor, len(rows), real, forward_only)
    collected = get_forward_backward_func()(
        forward_step_func=partial(_forward, actor, batch, on_last_stage, forward_only),
        data_iterator=[iter(micros) for _ in actor.model],
        model=actor.model,
        num_microbatches=len(micros),
        # of all ranks' parts; Megatron divides by cp and tp for what a stage receives
        seq_length=micros.shapes[0][1] * actor.config.parallel.cp,
        # residual streams stand beside each other as samples do
        micro_batch_size=micros.shapes[0][0] * actor.arch.num_streams,
        forward_only=forward_only,
    )
    if not actor.on_last_stage:
        return []
    counts = {"padded": padded, "real": real * (mpu.get_context_parallel_rank() == 0)}
    rank_metrics = {
        name: torch.full((), float(count), dtype=torch.float64, device=actor.mesh.device)
        for name, count in counts.items()
    }
    return [*collected, rank_metrics]


def _begin(actor: MegatronActor, num_samples: int, num_tokens: int, forward_only: bool) -> None:
    """Collective. Empties what routers, their losses and the draft keep for one run."""
    if not forward_only and actor.config.trains_draft:
        actor.bring_embedding()
    actor.router_scope.begin()
    if actor.router_losses is not None and not forward_only:
        totals = actor.mesh.reduce(torch.tensor([num_samples, num_tokens]), "sum")
        actor.router_losses.begin(*totals.tolist())
    if actor.routing is not None:
        actor.routing.begin()


def _forward(
    actor: MegatronActor,
    batch: Batch,
    on_last_stage: LastStage,
    forward_only: bool,
    iterator: Iterator[MicroBatch],
    model,
):
    """Returns the hidden states of the next micro-batch, and the function of them that Megatron
    calls on the last stage."""
    micro = next(iterator).to(actor.mesh.device)
    packed = None
    if micro.cu_seqlens is not None:
        packed = PackedSequences.make(micro.cu_seqlens, micro.sizes, micro.context)
    with actor.router_scope.of(MicroBatchScope(micro, batch, forward_only)):
        more: dict[str, object] = {}
        if not forward_only and actor.config.trains_draft and model.module.post_process:
            more["following"] = following(micro)
        if actor.arch.vision is not None:
            more["sight"] = Sight(actor.arch, actor.images, micro)
        hidden = model(micro.tokens, micro.positions, None, packed_seq_params=packed, **more)
    return hidden, partial(_loss, on_last_stage, micro, model.module)


def _loss(
    on_last_stage: LastStage, micro: MicroBatch, chunk: Body, hidden: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    value, sums = on_last_stage(micro, chunk, hidden)
    # the first of the ranks that share it counts it
    if mpu.get_context_parallel_rank() % micro.context:
        sums = {name: value * 0.0 for name, value in sums.items()}
    # 0 tokens: Megatron divides by nothing
    none = torch.zeros((), dtype=torch.int, device=hidden.device)
    return value, none, sums


def from_last_stage(tensor: Tensor) -> Tensor:
    """Collective over pipeline ranks. Returns the last stage's tensor, on every stage."""
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            tensor,
            src=mpu.get_pipeline_model_parallel_last_rank(),
            group=mpu.get_pipeline_model_parallel_group(),
        )
    return tensor


def from_context(actor: MegatronActor, values: Tensor) -> Tensor:
    """Collective over context-parallel ranks. Returns what any of them has, NaN where none does.

    values: NaN where this rank has none; without dynamic context parallelism all have the same.
    """
    if not actor.config.parallel.dynamic_context:
        return values
    found = values.masked_fill(values.isnan(), -torch.inf)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mpu.get_context_parallel_group())
    return found.masked_fill(found == -torch.inf, torch.nan)


def sum_over_ranks(actor: MegatronActor, collected: list[dict[str, Tensor]]) -> dict[str, float]:
    """Collective. Sums over micro-batches, then data- and context-parallel ranks, in float64; every
    rank gets the last stage's."""
    box = [sorted({name for sums in collected for name in sums})]
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
            values[i] += sums.get(name, 0.0)
    values = actor.mesh.reduce(from_last_stage(values), "sum")
    dist.all_reduce(values, group=mpu.get_context_parallel_group())
    router = {} if actor.router_losses is None else actor.router_losses.take()
    router |= {} if actor.routing is None else actor.routing.take()
    return {**dict(zip(names, values.tolist(), strict=True)), **router}
