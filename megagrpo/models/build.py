"""Builds the Megatron-Core model of a Hugging Face architecture and loads Hugging Face weights into
it.

`load_hf` only slices and copies. Recorded by weights/copies/recorder.py, its list of copies gives HF
export, the exchange plan and the digests; there is no second description of where weights lie.
"""

from collections.abc import Mapping, Sequence

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagrpo.config.actor import ActorConfig
from megagrpo.models import internals_0_19
from megagrpo.models.architecture import Architecture
from megagrpo.models.body import Body
from megagrpo.models.fields import Kernels
from megagrpo.models.kinds.draft.describe import draft_norms
from megagrpo.models.kinds.draft.layer import DraftLayer, mark_parameters
from megagrpo.models.kinds.ngrams.layer import NGramRows
from megagrpo.models.kinds.vision.layer import Tower
from megagrpo.models.layers.context import follow_context
from megagrpo.models.layers.lora import add_adapters, is_adapter
from megagrpo.models.layers.parts import Parts, parts_of
from megagrpo.models.layers.specs import block_spec, layer_spec
from megagrpo.models.table import FAMILIES
from megagrpo.models.tensors import HfTensors, RankPlace, Shard, load_vocabulary

_SHARDED_DIM = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}


def build_chunk(
    arch: Architecture,
    actor: ActorConfig,
    config: TransformerConfig,
    vp_stage: int | None,
    parts: Parts,
) -> Body:
    """Builds this rank's model of one pipeline stage (`vp_stage` with virtual ones), its weights
    uninitialized."""
    chunk = Body(arch, config, block_spec(arch, config, vp_stage, parts), vp_stage)
    if arch.draft and chunk.post_process:  # its layer is like the model's last one
        layer = layer_spec(arch, config, arch.num_layers, parts)
        chunk.draft = DraftLayer(config, layer, parts, vp_stage)
        mark_parameters(chunk.draft, actor.trains_draft)
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            # Megatron says "reduce over data-parallel ranks only" unless EP > 1, which leaves
            # expert gradients of TP + sequence parallel at EP 1 unreduced over TP: silently wrong.
            # Expert groups are right for every layout.
            parameter.allreduce = False
            # and that would count the last bias of an expert twice: over TP beside expert groups
            parameter.sequence_parallel = False
        if name.endswith(".softmax_offset"):  # of this rank's heads
            _mark_shard(parameter, 0)
    for module in chunk.modules():
        if type(module) in _SHARDED_DIM and module.weight is not None:
            # Megatron sets this mark only where it initializes a weight itself. Without it the
            # gradient norm counts every weight as a replica and misses the shards of all
            # tensor-parallel ranks but the first: clipped too little.
            _mark_shard(module.weight, _SHARDED_DIM[type(module)])
    if parts.transformer_engine:
        _mark_whole_weights(chunk)
    if arch.vision is not None and chunk.pre_process:
        chunk.visual = Tower(arch.vision, actor.trained_vision, actor.recompute == "full")
    return chunk


def _mark_shard(parameter: torch.nn.Parameter, dim: int) -> None:
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # read by Megatron
    parameter.partition_dim = dim  # type: ignore[attr-defined]  # likewise
    parameter.partition_stride = 1  # type: ignore[attr-defined]  # likewise


def _mark_whole_weights(chunk: Body) -> None:
    """Marks latent attention's down projections as held whole by every tensor-parallel rank.

    Transformer Engine marks each linear layer's weight as a shard. The gradient norm would count
    these once a rank, and clip too much.
    """
    from megatron.core.extensions.transformer_engine import TELinear

    for module in chunk.modules():
        if type(module) is TELinear:  # not its subclasses, the layers that are cut
            module.weight.tensor_model_parallel = False


def build_chunks(
    arch: Architecture,
    config: ActorConfig,
    transformer: TransformerConfig,
    kernels: Kernels,
    device: torch.device,
) -> list[Body]:
    """Builds this rank's models of all its pipeline stages on `device`, in the actor's dtype,
    uninitialized."""
    stages = range(config.parallel.vpp) if config.parallel.vpp > 1 else [None]
    parts = parts_of(kernels.transformer_engine)
    chunks = [build_chunk(arch, config, transformer, stage, parts).to(device) for stage in stages]
    if config.parallel.dynamic_context:
        for chunk in chunks:
            follow_context(chunk)
    if config.lora is not None:
        for chunk in chunks:
            add_adapters(chunk, arch, config.lora, _place(), transformer.params_dtype)
            chunk.to(device)
    return [_in_bfloat16(chunk) for chunk in chunks] if transformer.bf16 else chunks


def _in_bfloat16(chunk: Body) -> Body:
    """Casts a chunk except the biases of its routers, and what modules keep in float32."""
    kept = [p for p in chunk.parameters() if getattr(p, "stays_float32", False)]
    chunk.bfloat16()
    for parameter in kept:
        parameter.data = parameter.data.float()
    for module in chunk.modules():
        if isinstance(module, Tower):
            module.keep_float32()
        elif isinstance(module, TopKRouter):
            internals_0_19.keep_float32_bias(module)
    return chunk


def routers(chunks: Sequence[Body]) -> dict[int, TopKRouter]:
    """Returns the routers of the chunks by the numbers of their layers in the whole model, from
    0."""
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    return {
        layer.layer_number - 1: layer.mlp.router
        for layer in layers
        if isinstance(layer.mlp, MoELayer)
    }


def chunk_parameters(chunks: list[Body], adapters: bool = False) -> dict[str, Tensor]:
    """Returns a rank's live tensors of the HF model, or of adapters, by a name that is unique on
    it.

    A router's bias and its table are some of the model's and no parameters: they have no gradient.
    """
    others = ".router.expert_bias", ".router.table"
    return {
        f"{i}.{name}": tensor
        for i, chunk in enumerate(chunks)
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
        if is_adapter(name) == adapters
        and (isinstance(tensor, torch.nn.Parameter) or name.endswith(others))
    }


def load_hf(chunks: list[Body], arch: Architecture, hf: Mapping[str, Tensor]) -> None:
    """Copies this rank's slices of the HF tensors (checkpoint names and shapes) into the chunks'
    parameters."""
    place = _place()
    named = HfTensors(FAMILIES[arch.family], hf)
    with torch.no_grad():
        for chunk in chunks:
            if chunk.pre_process:
                load_vocabulary(
                    chunk.embedding.word_embeddings.weight,
                    named["model.embed_tokens.weight"],
                    place.tensor,
                )
                if arch.vision is not None:
                    chunk.visual.load_hf(hf)
            for layer in chunk.decoder.layers:
                arch.load_layer(layer, named, place)
            if chunk.post_process:
                if arch.norms:
                    chunk.decoder.final_layernorm.weight.copy_(named["model.norm.weight"])
                if arch.streams is not None:
                    arch.streams.load_head(chunk.decoder.final_layernorm, named)
                if not arch.tied:
                    load_vocabulary(
                        chunk.output_layer.weight, named["lm_head.weight"], place.tensor
                    )
                elif not chunk.pre_process:  # tied over two pipeline stages: each holds a copy
                    load_vocabulary(
                        chunk.output_layer.weight, named["model.embed_tokens.weight"], place.tensor
                    )
            if chunk.draft is not None:
                for spec in draft_norms(arch):
                    *_, module, _ = spec.name.split(".")
                    getattr(chunk.draft, module).weight.copy_(named[spec.name])
                arch.load_layer(chunk.draft.layer, named, place)


def map_tables(chunks: list[Body], arch: Architecture, hf: Mapping[str, Tensor]) -> None:
    """Lets layers read rows of tables that stay in the files of an HF folder. Raises ValueError as
    NGramRows.map_table does."""
    tables = HfTensors(FAMILIES[arch.family], hf)
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, NGramRows):
                module.map_table(tables)


def _place() -> RankPlace:
    return RankPlace(
        tensor=Shard(
            mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        ),
        expert=Shard(
            mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()
        ),
    )
