"""Builds Megatron's data-parallel wrappers and optimizer, and runs one optimizer step."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagrpo.models.body import Body
from megagrpo.models.internals_0_19 import find_by_dtype
from megagrpo.models.kinds.draft.layer import OF_DRAFT


def wrap_chunks(
    chunks: list[Body],
    transformer: TransformerConfig,
    ddp: DistributedDataParallelConfig,
) -> list[DistributedDataParallel]:
    """Collective. Gives each chunk its gradient buffers, and Megatron's schedule the functions that
    overlap requires.

    Without them it would reduce gradients after every micro-batch. They go into `transformer`,
    which must be complete.
    """
    model = [
        DistributedDataParallel(transformer, ddp, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]

    def each_chunk(functions: list):
        return functions if len(functions) > 1 else functions[0]

    if ddp.overlap_grad_reduce:
        transformer.no_sync_func = each_chunk([wrapper.no_sync for wrapper in model])
        transformer.grad_sync_func = each_chunk([wrapper.start_grad_sync for wrapper in model])
    if ddp.overlap_param_gather:
        for wrapper, chunk in zip(model, chunks, strict=True):
            _gather_output_weight(wrapper, chunk)
        if ddp.align_param_gather:
            transformer.param_sync_func = each_chunk(
                [partial(_start_gather, wrapper) for wrapper in model]
            )
    return model


def _start_gather(wrapper: DistributedDataParallel, *_: object) -> None:
    """Starts a chunk's gathers; the schedule calls it at every update, also if nothing was stepped
    since the last."""
    groups = wrapper.bucket_groups + wrapper.expert_parallel_bucket_groups
    if not all(group.param_gather_dispatched for group in groups):
        wrapper.start_param_sync()


def _gather_output_weight(wrapper: DistributedDataParallel, chunk: Body) -> None:
    """Completes the output weight with the layers' forward, which ends before it is used: our head
    and a draft call no module that would."""
    if not chunk.post_process:
        return
    weight = chunk.output_weight()

    def complete(*_: object) -> None:
        if weight in wrapper.param_to_bucket_group:
            wrapper.param_to_bucket_group[weight].finish_param_sync(
                skip_next_bucket_dispatch=wrapper.ddp_config.align_param_gather
            )

    chunk.decoder.register_forward_hook(complete)


def build_optimizer(
    model: list[DistributedDataParallel], settings: OptimizerConfig, with_adapters: bool
) -> ChainedOptimizer:
    """Collective. Returns Megatron's optimizer of dense and expert parameters."""
    # groups of their own: a field by which Megatron tells groups apart, and reads nowhere else
    groups = {
        **get_standard_config_overrides(settings),
        ParamKey(attr=OF_DRAFT): {"is_decoupled_lr": True},
    }
    optimizer = get_megatron_optimizer(settings, model, config_overrides=groups)
    find_by_dtype(optimizer)
    _share_step_counts(optimizer)
    # if only experts have adapters, the dense optimizer is a stub without a state
    if with_adapters:
        parts = optimizer.chained_optimizers
        optimizer.chained_optimizers = [part for part in parts if not part.is_stub_optimizer]
    return optimizer


def _share_step_counts(optimizer: ChainedOptimizer) -> None:
    """Lets a part that has no parameters on this rank, as the experts' of a stage without any, tell
    the other parts' number of steps: Megatron's checkpoints want one of each if Adam is torch's."""
    parts = [part.optimizer for part in optimizer.chained_optimizers]
    adams = [part for part in parts if isinstance(part, torch.optim.Adam)]

    def with_count(_: torch.optim.Optimizer, state: dict) -> dict:
        count: dict = next((values for adam in adams for values in adam.state.values()), {})
        return {**state, "state": {0: count}}

    for adam in adams:
        if not any(group["params"] for group in adam.param_groups):
            adam.register_state_dict_post_hook(with_count)


def optimizer_tensors(optimizer: ChainedOptimizer) -> Iterator[Tensor]:
    """Yields the parameters that an optimizer steps, and the tensors of its state."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:  # this rank has parameters of its kind
            yield from (
                parameter for group in part.optimizer.param_groups for parameter in group["params"]
            )
            state = (value for values in part.optimizer.state.values() for value in values.values())
            yield from (value for value in state if isinstance(value, Tensor))


@torch.no_grad()
def take_step(optimizer: ChainedOptimizer, *norms: float) -> None:
    """Collective. Clips gradients by their global norms, the model's and, if it is trained, the
    draft's, and steps.

    Megatron's own `step` would prepare the gradients and compute the norm again. `prepare_grads`
    and `get_grad_norm` came before.
    """
    for part in optimizer.chained_optimizers:
        most = part.config.clip_grad
        for of_draft, total in enumerate(norms):
            if most > 0 and (parameters := _parameters(part, bool(of_draft))):
                clip_grad_by_total_norm_fp32(
                    parameters, most, total, use_decoupled_grad=_decoupled(part)
                )
    optimizer.step_with_ready_grads()


@torch.no_grad()
def draft_norm(optimizer: ChainedOptimizer) -> float:
    """Collective. Returns the norm of the draft's gradients, which Megatron's norm leaves out; see
    mark_parameters."""
    norms = []
    for part in optimizer.chained_optimizers:
        attribute = "decoupled_grad" if _decoupled(part) else "grad"
        found = [p for p in _parameters(part, True) if param_is_not_tensor_parallel_duplicate(p)]
        gradients = [g for g in (getattr(p, attribute, None) for p in found) if g is not None]
        group = part.get_grad_stats_parallel_group()
        norms.append(float(get_grad_norm_fp32(gradients, grad_stats_parallel_group=group)))
    return math.hypot(*norms)


def _parameters(part: MegatronOptimizer, drafts: bool) -> list[Tensor]:
    """Returns the parameters that an optimizer steps, the model's or the draft's."""
    groups = [] if part.is_stub_optimizer else part.param_groups
    return [p for group in groups if group["is_decoupled_lr"] == drafts for p in group["params"]]


def _decoupled(part: MegatronOptimizer) -> bool:
    return part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
