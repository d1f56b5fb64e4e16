"""The Megatron-Core model of an HF architecture, and the one function that puts HF weights into it.

`load_hf` only slices and copies. Recorded by weights/record.py, its list of copies gives HF export, the exchange plan and
the digests; there is no second description of the weights anywhere.
"""

from collections.abc import Mapping

import torch
from megatron.core import parallel_state as mpu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megagrpo.actor.attention import CausalAttention
from megagrpo.actor.hf_config import Architecture

_SHARDED_DIM = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the mark that makes Megatron sum its gradient over sequence-parallel ranks (its own norm refuses SP)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel


class HiddenStatesModel(GPTModel):
    """GPTModel that ends at the hidden states: logits of all tokens are never held, see algo/logprob.py."""

    def _postprocess(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        return hidden_states

    def output_weight(self) -> Tensor:
        """[padded vocab / tp, hidden], on the last pipeline stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def _block_spec(
    config: TransformerConfig, vp_stage: int | None, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """Both kinds have parameters of the same names, but for experts: norms stay modules of their own."""
    if transformer_engine:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        backend = TESpecProvider()
        norm, attention = backend.layer_norm(rms_norm=True), backend.core_attention()
    else:
        backend, norm, attention = LocalSpecProvider(), RmsNorm, CausalAttention
    head_norm = norm if config.qk_layernorm else IdentityOp
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=backend.column_parallel_linear(),
                    core_attention=attention,
                    linear_proj=backend.row_parallel_linear(),
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=get_mlp_module_spec_for_backend(
                backend, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=norm)


def build_chunk(
    arch: Architecture, config: TransformerConfig, vp_stage: int | None, transformer_engine: bool
) -> HiddenStatesModel:
    """One pipeline stage's model on this rank (`vp_stage` with virtual pipelining). Its weights are uninitialised: load them."""
    scaling = arch.rope_scaling
    tp = config.tensor_model_parallel_size
    chunk = HiddenStatesModel(
        config,
        _block_spec(config, vp_stage, transformer_engine),
        vocab_size=-(-arch.vocab_size // tp) * tp,
        max_sequence_length=arch.max_positions,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
        rope_scaling=scaling is not None,
        rope_scaling_factor=scaling["factor"] if scaling else 8.0,
        vp_stage=vp_stage,
    )
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            # Megatron says "reduce over data-parallel ranks only" unless EP > 1, which leaves expert gradients of
            # TP + sequence parallel at EP 1 unreduced over TP: silently wrong. Expert groups are right for every layout.
            parameter.allreduce = False
    for module in chunk.modules():
        if type(module) in _SHARDED_DIM and module.weight is not None:
            # Megatron sets this mark only where it initialises a weight itself. Without it the gradient norm counts every
            # weight as a replica and misses the shards of all tensor-parallel ranks but the first: clipped too little.
            module.weight.tensor_model_parallel, module.weight.partition_dim = True, _SHARDED_DIM[type(module)]
            module.weight.partition_stride = 1
    return chunk


def load_hf(chunks: list[HiddenStatesModel], arch: Architecture, hf: Mapping[str, Tensor]) -> None:
    """Copy this rank's slices of the HF tensors (checkpoint names and shapes) into the chunks' parameters."""
    with torch.no_grad():
        for chunk in chunks:
            if chunk.pre_process:
                _load_vocab(chunk.embedding.word_embeddings.weight, hf["model.embed_tokens.weight"])
            for layer in chunk.decoder.layers:
                _load_layer(layer, arch, hf, f"model.layers.{layer.layer_number - 1}.")
            if chunk.post_process:
                chunk.decoder.final_layernorm.weight.copy_(hf["model.norm.weight"])
                if not arch.tied:
                    _load_vocab(chunk.output_layer.weight, hf["lm_head.weight"])
                elif not chunk.pre_process:  # tied over two pipeline stages: each holds a copy
                    _load_vocab(chunk.output_layer.weight, hf["model.embed_tokens.weight"])


def _tp_rows(tensor: Tensor) -> Tensor:
    return tensor.chunk(mpu.get_tensor_model_parallel_world_size(), 0)[mpu.get_tensor_model_parallel_rank()]


def _tp_columns(tensor: Tensor) -> Tensor:
    return tensor.chunk(mpu.get_tensor_model_parallel_world_size(), 1)[mpu.get_tensor_model_parallel_rank()]


def _load_vocab(weight: Tensor, hf: Tensor) -> None:
    """Rows of a vocabulary that is padded to a multiple of tp; the rows beyond the real ones are 0 and never sampled."""
    start = mpu.get_tensor_model_parallel_rank() * weight.shape[0]
    real = hf[start : start + weight.shape[0]]
    weight[: len(real)].copy_(real)
    if len(real) < len(weight):
        weight[len(real) :].zero_()


def _load_layer(layer: TransformerLayer, arch: Architecture, hf: Mapping[str, Tensor], prefix: str) -> None:
    attention = layer.self_attention
    layer.input_layernorm.weight.copy_(hf[prefix + "input_layernorm.weight"])
    layer.pre_mlp_layernorm.weight.copy_(hf[prefix + "post_attention_layernorm.weight"])
    _load_qkv(attention.linear_qkv.weight, arch, hf, prefix, "weight")
    if arch.qkv_bias:
        _load_qkv(attention.linear_qkv.bias, arch, hf, prefix, "bias")
    attention.linear_proj.weight.copy_(_tp_columns(hf[prefix + "self_attn.o_proj.weight"]))
    if arch.qk_norm:
        attention.q_layernorm.weight.copy_(hf[prefix + "self_attn.q_norm.weight"])
        attention.k_layernorm.weight.copy_(hf[prefix + "self_attn.k_norm.weight"])
    if not arch.is_moe:
        rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        _load_mlp(layer.mlp.linear_fc1.weight, layer.mlp.linear_fc2.weight, hf, prefix + "mlp.", rank, size)
        return
    layer.mlp.router.weight.copy_(hf[prefix + "mlp.gate.weight"])
    rank, size = mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()
    for place, index in enumerate(layer.mlp.local_expert_indices):
        _load_mlp(*_expert_weights(layer.mlp.experts, place), hf, f"{prefix}mlp.experts.{index}.", rank, size)


def _expert_weights(experts, place: int) -> tuple[Tensor, Tensor]:
    """Of the place-th local expert: a module of its own, or one of the numbered weights of Transformer Engine's grouped layers."""
    if hasattr(experts, "local_experts"):
        expert = experts.local_experts[place]
        return expert.linear_fc1.weight, expert.linear_fc2.weight
    return getattr(experts.linear_fc1, f"weight{place}"), getattr(experts.linear_fc2, f"weight{place}")


def _load_qkv(parameter: Tensor, arch: Architecture, hf: Mapping[str, Tensor], prefix: str, kind: str) -> None:
    """Megatron interleaves by key/value head: [q of its queries, k, v] for each of the local groups."""
    queries, dim, groups = arch.num_heads // arch.num_kv_heads, arch.head_dim, arch.num_kv_heads
    local = groups // mpu.get_tensor_model_parallel_world_size()
    tail = parameter.shape[1:]  # (hidden,) for the weight, () for the bias
    target = parameter.view(local, queries + 2, dim, *tail)
    places = {
        "q": (slice(0, queries), queries),
        "k": (slice(queries, queries + 1), 1),
        "v": (slice(queries + 1, None), 1),
    }
    for name, (place, heads) in places.items():
        source = hf[f"{prefix}self_attn.{name}_proj.{kind}"].view(groups, heads, dim, *tail)
        target[:, place].copy_(_tp_rows(source))


def _load_mlp(fc1: Tensor, fc2: Tensor, hf: Mapping[str, Tensor], prefix: str, rank: int, size: int) -> None:
    gate, up = (hf[f"{prefix}{name}_proj.weight"].chunk(size, 0)[rank] for name in ("gate", "up"))
    fc1[: len(gate)].copy_(gate)
    fc1[len(gate) :].copy_(up)
    fc2.copy_(hf[prefix + "down_proj.weight"].chunk(size, 1)[rank])
