"""Layer specs for Megatron: torch's or Transformer Engine's modules, dense or with experts."""

from dataclasses import replace
from functools import partial

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
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
from torch import Tensor

from megagrpo.models.architecture import Architecture
from megagrpo.models.kinds.draft.layer import LayerModules
from megagrpo.models.kinds.gated_delta.layer import gated_delta_spec
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.kinds.grouped_query.layer import CausalAttention
from megagrpo.models.kinds.grouped_query.norm_over_heads import NormOverHeads
from megagrpo.models.kinds.indexed.layer import sparse_attention
from megagrpo.models.layers.whole_linear import WholeLinear


class RmsNorm(torch.nn.RMSNorm):
    """Marks torch's RMSNorm so that Megatron sums its gradient over sequence-parallel ranks; its
    own refuses them."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(
            hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by Megatron
        self._centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """As torch's; a zero-centered weight is added to 1, in float32 as engines do."""
        if not self._centered:
            return super().forward(x)
        weight = 1.0 + self.weight.float()
        normed = torch.nn.functional.rms_norm(x.float(), self.normalized_shape, weight, self.eps)
        return normed.to(x.dtype)


def block_spec(
    config: TransformerConfig,
    vp_stage: int | None,
    transformer_engine: bool,
    layer: type[TransformerLayer],
    arch: Architecture,
) -> TransformerBlockSubmodules:
    """Returns this stage's layers, of a class `layer`, of torch or of Transformer Engine."""
    modules = layer_modules(config, transformer_engine, layer)
    if isinstance(arch.attention, GroupedQuery) and arch.attention.norm_over_heads:
        modules = modules._replace(layer=_with_norms_over_heads(modules.layer, config))
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    own = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    layers = [_of_layer(modules, config, index) for index in own]
    return TransformerBlockSubmodules(layers, layer_norm=modules.norm)


def _of_layer(modules: LayerModules, config: TransformerConfig, index: int) -> ModuleSpec:
    """Returns the specification of a layer of the whole model, which lists of the configuration
    describe by layer."""
    parts = modules.layer.submodules
    if isinstance(config.moe_layer_freq, list) and not config.moe_layer_freq[index]:
        parts = replace(parts, mlp=modules.one_mlp)
    if isinstance(config.linear_attention_freq, list) and config.linear_attention_freq[index]:
        parts = replace(parts, self_attention=modules.linear_attention)
    return replace(modules.layer, submodules=parts)


def _with_norms_over_heads(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    attention = layer.submodules.self_attention
    norms = replace(
        attention.submodules,
        q_layernorm=partial(NormOverHeads, heads=config.num_attention_heads),
        k_layernorm=partial(NormOverHeads, heads=config.num_query_groups),
    )
    attention = replace(attention, submodules=norms)
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))


def layer_modules(
    config: TransformerConfig, transformer_engine: bool, layer: type[TransformerLayer]
) -> LayerModules:
    """Returns what a layer of a class `layer` is built of.

    Torch's and Transformer Engine's have parameters of the same names, except for experts: norms
    stay modules of their own.
    """
    if transformer_engine:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        backend = TESpecProvider()
        norm = backend.layer_norm(rms_norm=True)
        attention = backend.core_attention()
        whole_linear = backend.linear()
    else:
        backend = LocalSpecProvider()
        norm = RmsNorm
        attention = CausalAttention
        whole_linear = WholeLinear
    if config.multi_latent_attention:
        latent: type = MLASelfAttention
        if config.experimental_attention_variant == "dsa":
            latent, attention = sparse_attention(transformer_engine)
        attention_spec = _latent_attention(backend, norm, latent, attention, whole_linear)
    else:
        attention_spec = _grouped_attention(
            backend, norm if config.qk_layernorm else IdentityOp, attention
        )
    # Megatron's own gated MLP, of Transformer Engine, has the norm before it inside its first layer
    linears = MLPSubmodules(
        linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear()
    )
    feed_forward = one_mlp = ModuleSpec(module=MLP, submodules=linears)
    if (count := config.num_moe_experts) is not None:
        feed_forward = get_moe_module_spec_for_backend(
            backend, count, moe_grouped_gemm=config.moe_grouped_gemm
        )
    spec = ModuleSpec(
        module=layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention_spec,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=feed_forward,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    linear = gated_delta_spec(backend.column_parallel_linear(), backend.row_parallel_linear())
    return LayerModules(spec, one_mlp, linear, norm, whole_linear)


def _grouped_attention(
    backend: BackendSpecProvider, head_norm: type, attention: type
) -> ModuleSpec:
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=attention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _latent_attention(
    backend: BackendSpecProvider,
    norm: type,
    latent: type,
    attention: type | ModuleSpec,
    whole_linear: type,
) -> ModuleSpec:
    column = backend.column_parallel_linear()
    return ModuleSpec(
        module=latent,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=whole_linear,
            linear_q_up_proj=column,
            linear_kv_down_proj=whole_linear,
            linear_kv_up_proj=column,
            core_attention=attention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )
