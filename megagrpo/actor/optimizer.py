"""Builds Megatron's data-parallel wrappers and optimizer, and runs one optimizer step."""

from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagrpo.actor.megatron.model import HiddenStatesModel


def wrap_chunks(
    chunks: list[HiddenStatesModel], transformer: TransformerConfig, ddp: DistributedDataParallelConfig
) -> list[DistributedDataParallel]:
    """Collective. Gives each chunk its gradient buffers, and Megatron's schedule the functions that overlap requires.

    Without them it would reduce gradients after every micro-batch. They go into `transformer`, which must be complete.
    """
    model = [
        DistributedDataParallel(transformer, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
    ]

    def of_all(functions: list):
        return functions if len(functions) > 1 else functions[0]

    if ddp.overlap_grad_reduce:
        transformer.no_sync_func = of_all([wrapper.no_sync for wrapper in model])
        transformer.grad_sync_func = of_all([wrapper.start_grad_sync for wrapper in model])
    if ddp.overlap_param_gather:
        for wrapper, chunk in zip(model, chunks, strict=True):
            _gather_output_weight(wrapper, chunk)
        if ddp.align_param_gather:
            transformer.param_sync_func = of_all([partial(_start_gather, wrapper) for wrapper in model])
    return model


def _start_gather(wrapper: DistributedDataParallel, *_: object) -> None:
    """Starts a chunk's gathers; the schedule calls it at every update, also if nothing was stepped since the last."""
    groups = wrapper.bucket_groups + wrapper.expert_parallel_bucket_groups
    if not all(group.param_gather_dispatched for group in groups):
        wrapper.start_param_sync()


def _gather_output_weight(wrapper: DistributedDataParallel, chunk: HiddenStatesModel) -> None:
    """Completes the output weight with the forward that ends before it: our head calls no module that would."""
    if not chunk.post_process:
        return
    weight = chunk.output_weight()

    def complete(*_: object) -> None:
        if weight in wrapper.param_to_bucket_group:
            wrapper.param_to_bucket_group[weight].finish_param_sync(
                skip_next_bucket_dispatch=wrapper.ddp_config.align_param_gather
            )

    chunk.register_forward_hook(complete)


def build_optimizer(
    model: list[DistributedDataParallel], settings: OptimizerConfig, with_adapters: bool
) -> ChainedOptimizer:
    """Collective. Returns Megatron's optimiser of dense and expert parameters."""
    optimizer = get_megatron_optimizer(settings, model)
    if with_adapters:  # if only experts have adapters, the dense optimiser is a stub without a state
        parts = optimizer.chained_optimizers
        optimizer.chained_optimizers = [part for part in parts if not part.is_stub_optimizer]
    return optimizer


@torch.no_grad()
def take_step(optimizer: ChainedOptimizer, norm: float) -> None:
    """Collective. Clips gradients by their global `norm` and steps, as Megatron's `step` does once both are known.

    Its own would prepare the gradients and compute the norm again. `prepare_grads` and `get_grad_norm` came before.
    """
    for part in optimizer.chained_optimizers:
        parameters: list[Tensor] = [] if part.is_stub_optimizer else part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm, use_decoupled_grad=decoupled)
    optimizer.step_with_ready_grads()
