"""Layer specs for Megatron: a layer is what its kinds build of the same parts."""

from collections.abc import Callable
from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megagrpo.models.architecture import Architecture
from megagrpo.models.kinds.clamped.describe import ClampedExperts
from megagrpo.models.kinds.clamped.layer import clamped_spec
from megagrpo.models.kinds.compressed.describe import CompressedAttention
from megagrpo.models.kinds.compressed.layer import CompressedMixer
from megagrpo.models.kinds.gated_delta.describe import GatedDelta
from megagrpo.models.kinds.gated_delta.layer import GatedDeltaNet
from megagrpo.models.kinds.gated_residual.describe import GatedResidual
from megagrpo.models.kinds.gated_residual.layer import GatedHead, GatedPlace
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.grouped_query.layer import grouped_query_spec
from megagrpo.models.kinds.hashed.describe import HashedExperts
from megagrpo.models.kinds.hashed.layer import HashedRouter
from megagrpo.models.kinds.hyper_connections.describe import HyperConnections
from megagrpo.models.kinds.hyper_connections.layer import (
    HyperConnection,
    StreamHead,
    StreamLayer,
    norm_of_mean,
    without_residual,
)
from megagrpo.models.kinds.kda.describe import Kda
from megagrpo.models.kinds.kda.layer import KimiDeltaAttention
from megagrpo.models.kinds.latent.describe import LatentAttention
from megagrpo.models.kinds.latent.layer import latent_spec
from megagrpo.models.kinds.mamba2.describe import Mamba2
from megagrpo.models.kinds.mamba2.layer import Mamba2Mixer
from megagrpo.models.kinds.ngrams.layer import NGramLayer
from megagrpo.models.kinds.pooled.describe import PooledQuery
from megagrpo.models.kinds.pooled.layer import pooled_spec
from megagrpo.models.kinds.vision.layer import SeeingLayer
from megagrpo.models.layers.parts import Parts

# what mixes tokens -> its module's specification; or its module, which gets parts and sizes
_MIXERS: dict[type, Callable[..., ModuleSpec]] = {
    GroupedQuery: grouped_query_spec,
    LatentAttention: latent_spec,
    PooledQuery: pooled_spec,
}
_MODULES: dict[type, type] = {
    CompressedAttention: CompressedMixer,
    GatedDelta: GatedDeltaNet,
    Kda: KimiDeltaAttention,
    Mamba2: Mamba2Mixer,
}
# what mixes residual streams -> its module at a place of a layer, and the one before the output layer
_STREAMS: dict[type, tuple[type, Callable[..., object]]] = {
    HyperConnections: (HyperConnection, StreamHead),
    GatedResidual: (GatedPlace, GatedHead),
}


def block_spec(
    arch: Architecture, config: TransformerConfig, vp_stage: int | None, parts: Parts
) -> TransformerBlockSubmodules:
    """Returns the layers of this stage."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    own = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    layers = [layer_spec(arch, config, index, parts) for index in own]
    last: Callable[..., object] = parts.norm
    if arch.streams is not None:
        _, head = _STREAMS[type(arch.streams)]
        head = head if arch.streams.has_head else norm_of_mean
        last = partial(head, own=arch.streams, norm=parts.norm)
    return TransformerBlockSubmodules(layers, layer_norm=last)


def layer_spec(
    arch: Architecture, config: TransformerConfig, index: int, parts: Parts
) -> ModuleSpec:
    """Returns layer `index` of the model, counted from 0; one behind the last is the draft's.

    Megatron's own submodules, for what a layer has not, hand on what they get.
    """
    mixer = arch.mixer(index)
    layer = TransformerLayerSubmodules()
    if mixer is not None:
        if arch.norms:
            layer.input_layernorm = parts.norm
        given = {"parts": parts, "sizes": mixer}
        module = _MODULES.get(type(mixer))
        layer.self_attention = (
            ModuleSpec(module=module, params=given) if module else _MIXERS[type(mixer)](**given)
        )
        layer.self_attn_bda = get_bias_dropout_add
    if arch.has_experts(index):
        own, grouped = arch.routed, config.moe_grouped_gemm
        layer.mlp = get_moe_module_spec_for_backend(
            parts.backend, own.count, moe_grouped_gemm=grouped
        )
        if isinstance(own, ClampedExperts):
            layer.mlp = clamped_spec(parts.backend, grouped)
        elif isinstance(own, HashedExperts) and index < own.hashed:
            layer.mlp.keywords["submodules"].router = partial(HashedRouter, own.vocabulary)
    elif arch.has_mlp(index):
        # Megatron's own gated MLP, of Transformer Engine, has the norm before it inside its first
        # layer
        linears = MLPSubmodules(linear_fc1=parts.column, linear_fc2=parts.row)
        layer.mlp = ModuleSpec(module=MLP, submodules=linears)
    if arch.has_experts(index) or arch.has_mlp(index):
        if arch.norms:
            layer.pre_mlp_layernorm = parts.norm
        layer.mlp_bda = get_bias_dropout_add
    if arch.streams is not None:
        layer.self_attn_bda = layer.mlp_bda = without_residual
        place, _ = _STREAMS[type(arch.streams)]
        streams: dict[str, object] = {"streams": arch.streams, "place": place}
        if arch.ngrams and index in arch.ngrams.layers:
            streams["ngrams"] = arch.ngrams
            return ModuleSpec(module=NGramLayer, params=streams, submodules=layer)
        return ModuleSpec(module=StreamLayer, params=streams, submodules=layer)
    sees = arch.vision is not None and index < arch.num_layers
    return ModuleSpec(module=SeeingLayer if sees else TransformerLayer, submodules=layer)
