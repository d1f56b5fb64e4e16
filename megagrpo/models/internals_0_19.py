"""Every use of a private name of Megatron-Core 0.19, each with its reason; a new version of
Megatron means a new file.

One stays elsewhere: the attribute `router_replay` of TopKRouter, which is public but undocumented
(routing/replay.py).
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from io import IOBase
from queue import Queue

import torch
from megatron.core import __version__ as _installed
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.models.common.embeddings import (
    RotaryEmbedding,
    YarnRotaryEmbedding,
    rope_utils,
)
from megatron.core.optimizer import ChainedOptimizer, clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.safe_globals import safe_load_from_bytes
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_layer, moe_utils, token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.utils import local_multi_tensor_scale
from torch import Tensor
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item

from megagrpo.models.kinds.grouped_query.layer import CausalAttention
from megagrpo.models.layers import combine, rotary
from megagrpo.models.layers.whole_linear import WholeLinear

_VERSION = "0.19."
if not _installed.startswith(_VERSION):
    raise ImportError(
        f"megatron-core {_installed} is installed, but megagrpo uses private functions of "
        f"{_VERSION}x: pip install 'megatron-core>=0.19,<0.20'"
    )

# modules that warn every run of classes and forms which a later version will replace
_ADVISORS = (
    "transformer.transformer_layer",
    "distributed.distributed_data_parallel",
    "dist_checkpointing.strategies.torch",
)


def install() -> None:
    """Replaces what has to differ on every machine, once, before a model is built."""
    # The router reads this name without Transformer Engine too, but it is defined only with some
    # releases of it. With them products would be rounded, and a run that goes on with another
    # release would choose other experts.
    moe_utils.te_general_gemm = None
    # Latent attention accepts four classes of down projections by name; ours takes the slot of
    # ModelOpt's. Without Transformer Engine it sets HAVE_TE all the same, and would call isinstance
    # with something that is no class.
    multi_latent_attention.Linear = WholeLinear
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    # It would refuse a norm of the keys' latent beside queries without one, as Moonlight has.
    multi_latent_attention.MLASelfAttention._resolve_qk_norm_config = _as_specified
    multi_latent_attention._prepare_mla_core_attention_value = partial(
        _padded_for_kernels, multi_latent_attention._prepare_mla_core_attention_value
    )
    token_dispatcher.unpermute = combine.unpermute
    # projections of latent experts, which Megatron builds of Transformer Engine's class only
    if not isinstance(moe_layer.TELinear, type):
        moe_layer.TELinear, moe_layer.HAVE_TE = WholeLinear, True
    # Megatron replaces the function that a pickled tensor names. Engines, which have no Megatron and
    # unpickle only what they know, would end themselves at the first publish.
    safe_load_from_bytes.__module__ = torch.storage.__name__
    safe_load_from_bytes.__qualname__ = safe_load_from_bytes.__name__ = "_load_from_bytes"
    # Transformer Engine's and Apex's kernels read every gradient as the first one's type; with
    # main_grads_dtype bfloat16 those of float32 parameters (A_log of gated delta nets) are float32.
    clip_grads.l2_norm_impl = _norm_of_tensors
    clip_grads.multi_tensor_scale_impl = local_multi_tensor_scale
    share_angles()
    for name in _ADVISORS:
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)


def _as_specified(_: object, submodules: MLASelfAttentionSubmodules) -> dict:
    """Returns the modules of latent attention by their names."""
    return vars(submodules)


def _padded_for_kernels(
    pad: Callable, attention: torch.nn.Module, query: Tensor, value: Tensor, packed: object
) -> tuple:
    """Pads packed values of latent attention to the queries' width for Transformer Engine alone; our
    attention takes both."""
    if isinstance(attention.core_attention, CausalAttention):
        return value, False, value.shape[-1], value.shape[-1]
    return pad(attention, query, value, packed)


def _norm_of_tensors(
    chunk_size: int, overflow: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Returns the norm [1] of all tensors of the first list; Megatron's own waits for the device
    once a tensor."""
    norms = torch._foreach_norm(tensor_lists[0], dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))[None], None


def share_angles() -> None:
    """Replaces rotary embeddings: float32 angles, packed rows without reading their lengths back
    (rotary.py), and the angles of one length in memory.

    Each micro-batch has another longest sample: Megatron's cache of 32 lengths has not seen it, and
    would hold 4 GiB of the device near 262,144 tokens.
    """
    names = vars(rope_utils)
    names |= {
        "_apply_rotary_pos_emb_bshd": rotary.rotate,
        "_apply_rotary_pos_emb_thd": rotary.rotate_packed,
    }
    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        vars(sys.modules[kind.__module__])["get_pos_emb_on_this_cp_rank"] = rotary.own_angles
        kind.forward = lru_cache(maxsize=1)(kind.forward.__wrapped__)


def admit_fused_weight_gradient() -> None:
    """Passes the output layer's check for Apex's kernel, which is never called: our head reads the
    layer's weight."""
    layers._grad_accum_fusion_available = True


def keep_float32_bias(router: TopKRouter) -> None:
    """Restores float32 of a router's bias after a cast: rounded, it would send tokens to other
    experts."""
    router._maintain_float32_expert_bias()


def expect_results_of_threads() -> None:
    """Makes a checkpoint's results come through a new queue of this process.

    Megatron's forked writers use a manager process. New for each save: `finish` never reads results
    that a rank has written of a save that failed on another rank.
    """
    filesystem_async._results_queue = Queue()


@contextmanager
def main_rank_fails_last() -> Iterator[None]:
    """Inside, what the main rank alone writes of a checkpoint fails at the end, with OSError: before
    that the other ranks wait for its messages."""
    failures: list[Exception] = []

    def tried(write: Callable) -> Callable:
        def wrapped(*args: object) -> None:
            try:
                write(*args)
            except (OSError, RuntimeError) as exc:  # torch's own of a full disk
                failures.append(exc)

        return wrapped

    with ExitStack() as stack:
        for owner, name in (
            (filesystem_async.FileSystemWriterAsync, "finish"),
            (serialization, "save_config"),
        ):
            stack.enter_context(_replaced(owner, name, tried(getattr(owner, name))))
        yield
    if failures:
        raise OSError(str(failures[0])) from failures[0]


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Gives a name of a module, a class or an object another value inside."""
    with ExitStack() as stack:
        if name in vars(owner):
            stack.callback(setattr, owner, name, vars(owner)[name])
        else:  # an object's, which its class has
            stack.callback(delattr, owner, name)
        setattr(owner, name, value)
        yield


def put_results(request: AsyncRequest, results: dict[int, list]) -> None:
    """Puts a writer's results where the request's finalization reads them."""
    request.async_fn_args[2].put(results)


def write_items(request: AsyncRequest, file: IOBase, key: str, items: Iterable[tuple]) -> list:
    """Writes (item, data) pairs into one file as the request's own writer does; returns its
    results."""
    [transforms] = request.async_fn.args[0]
    return [
        _write_item(transforms, file, data, item, key, SerializationFormat.TORCH_SAVE)
        for item, data in items
    ]


def allocate_state(optimizer: DistributedOptimizer) -> None:
    """Allocates the optimizer's state, which Megatron asserts before it describes what to load.

    It steps with zero gradients; everything that this writes is loaded next.
    """
    optimizer._init_optimizer_states_with_dummy_values()


def load_in_place(optimizer: DistributedOptimizer) -> None:
    """Makes loading write into the allocated state.

    Transformer Engine's Adam would cast it to the parameters' type and allocate a second one before
    it frees the first.
    """
    inner = optimizer.optimizer
    if not hasattr(inner, "set_scaled_state"):  # torch's, or the hybrid one
        return

    def load_groups(state: dict) -> None:
        for group, saved in zip(inner.param_groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    inner.load_state_dict = load_groups


def forget_fp8_weights(model: torch.nn.Module) -> None:
    """Frees Transformer Engine's copies of weights in FP8, which the next first micro-batch makes
    again."""
    for module in model.modules():
        getattr(module, "_fp8_workspaces", {}).clear()


def sync_hybrid_state(optimizer: DistributedOptimizer) -> None:
    """Copies loaded state into the parts of an offloaded optimizer; only the fully reshardable form
    does it itself."""
    optimizer.optimizer._sync_hdo_state_to_sub_optimizers()


@contextmanager
def without_padding_mark(optimizer: DistributedOptimizer) -> Iterator[None]:
    """Sets a parameter's state inside without the mark `padding`, which Megatron leaves among its
    tensors.

    An optimizer that keeps weights of its own takes every name for a tensor's.
    """
    whole = optimizer._set_main_param_and_optimizer_states

    def initialize(parameter: Tensor, state: dict[str, Tensor]) -> None:
        whole(parameter, {name: value for name, value in state.items() if name != "padding"})

    with _replaced(optimizer, whole.__name__, initialize):
        yield


def preloaded(request: AsyncRequest) -> list:
    """Returns the buckets of a save on the host, in memory that is given back with them.

    Megatron's own copies of GPU tensors are pinned, which torch rounds up to powers of two and
    keeps for the run.
    """
    preload = request.preload_fn
    assert isinstance(preload, partial), "preload_tensors of buckets, pinned"
    return preload.func(preload.args[0], non_blocking=False)


def find_by_dtype(optimizer: ChainedOptimizer) -> None:
    """Corrects where Megatron's checkpoints find a parameter in a group of two dtypes: its sharded
    optimizer puts the float32 ones first after it has counted all in the model's order."""
    for part in optimizer.chained_optimizers:
        if not isinstance(part, DistributedOptimizer) or part.is_stub_optimizer:
            continue
        by_group = zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
        for group, (float32, others) in enumerate(by_group):
            for place, parameter in enumerate([*float32, *others]):
                part.model_param_group_index_map[parameter] = group, place
