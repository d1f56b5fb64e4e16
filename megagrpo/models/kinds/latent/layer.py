"""Megatron's latent attention, of our parts."""

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from megagrpo.models.kinds.indexed.layer import IndexedCore, sparse_attention
from megagrpo.models.kinds.latent.describe import LatentAttention
from megagrpo.models.layers.parts import Parts


class WithoutPositions(MLASelfAttention):
    """Turns queries and keys by angles of 0; Megatron's own do not know that nothing may turn."""

    def __init__(self, *args: object, **options: object):
        super().__init__(*args, **options)
        width, device = self.config.qk_pos_emb_head_dim, torch.cuda.current_device()
        # equal ones need no order of ranks
        self.rotary_pos_emb.forward = lambda n, **_: torch.zeros(n, 1, 1, width, device=device)


def latent_spec(sizes: LatentAttention, parts: Parts) -> ModuleSpec:
    """Returns the specification of latent attention, sparse if it has an indexer."""
    module: type = MLASelfAttention if sizes.rotary.fraction else WithoutPositions
    core: type | ModuleSpec = parts.core_attention
    if sizes.indexer is not None and sizes.indexer.pool > 1:
        core = ModuleSpec(module=IndexedCore, params={"pool": sizes.indexer.pool})
    elif sizes.indexer is not None:
        module, core = sparse_attention(parts.transformer_engine)
    return ModuleSpec(
        module=module,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=parts.column,
            linear_q_down_proj=parts.whole_linear,
            linear_q_up_proj=parts.column,
            linear_kv_down_proj=parts.whole_linear,
            linear_kv_up_proj=parts.column,
            core_attention=core,
            linear_proj=parts.row,
            q_layernorm=parts.norm,
            kv_layernorm=parts.norm,
        ),
    )
