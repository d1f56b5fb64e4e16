"""The model of one pipeline stage on Megatron-Core's parts: embedding, decoder layers, final norm,
output weight.

Megatron's own GPTModel is deprecated, computes logits of all tokens, and knows neither images nor
drafts as they are trained here.
"""

from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Offloading,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megagrpo.models.architecture import Architecture
from megagrpo.models.kinds.draft.layer import DraftLayer, Following, embed
from megagrpo.models.kinds.vision.layer import Sight


class Body(LanguageModule):
    """Maps tokens, or the hidden states of the stage before, to hidden states: logits of all tokens
    are never held, see algo/logprob.py.

    A vision-language model has the module `visual` on the first stage, and its forward gets the
    micro-batch's Sight. A model with a draft has it on the last stage; a forward that gets what
    follows its tokens runs it, too. Names of modules are GPTModel's, so checkpoints of both agree.
    """

    draft: DraftLayer | None  # set by build_chunk
    _drafted: tuple[Tensor, Following] | None = None
    _marked = False  # its parameters stay on the GPU, see _prepare_offloading

    def __init__(
        self,
        arch: Architecture,
        config: TransformerConfig,
        layers: TransformerBlockSubmodules,
        vp_stage: int | None,
    ):
        super().__init__(config=config)
        self.draft = None
        groups = self.pg_collection
        vocab_size = -(-arch.vocab_size // groups.tp.size()) * groups.tp.size()
        self.vp_stage = vp_stage
        self._streams = arch.num_streams
        self.pre_process = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        self.post_process = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        # Megatron's pipeline and its reduction of gradients read these two.
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = arch.tied
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config,
                vocab_size,
                arch.max_positions,
                position_embedding_type="none",
                # Sight does it, with features of images inserted
                scatter_to_sequence_parallel=arch.vision is None,
                tp_group=groups.tp,
            )
        if arch.plain_rotary:
            self.rotary_pos_emb = _rotary(arch, config, groups.cp)
        self.decoder = TransformerBlock(
            config=config,
            spec=layers,
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        if self.post_process:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_weight_param_allocation=self.pre_process and arch.tied,
                tp_group=groups.tp,
            )
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Hands the decoder the hidden states of the stage before; Megatron's pipeline calls it."""
        (hidden,) = input_tensor
        self.decoder.set_input_tensor(hidden)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        sight: Sight | None = None,
        following: Following | None = None,
    ) -> Tensor:
        """Returns hidden states [s / tp, b, h] from tokens [b, s] and positions [b, s]; packed
        tokens are [1, s].

        sight: of a vision-language model. following: for the draft, on the last stage.
        """
        self._prepare_offloading()
        hidden = None
        more: dict[str, object] = {"attention_bias": tokens} if self._streams > 1 else {}
        if self.pre_process:
            hidden = self.embedding(input_ids=tokens, position_ids=positions)
            if sight is not None:
                hidden = sight.with_features(hidden, self.visual)
                more = {"attention_bias": sight}  # see SeeingLayer
            hidden = hidden.repeat_interleave(self._streams, 1)  # see StreamLayer
        angles = self._angles(hidden, packed_seq_params) if sight is None else sight.angles
        attention = {
            "attention_mask": attention_mask,
            "rotary_pos_emb": angles,
            "packed_seq_params": packed_seq_params,
        }
        hidden = self.decoder(hidden_states=hidden, **attention, **more)
        if self.draft is not None and following is not None:
            embedded = embed(self._input_embedding(), following.tokens)
            self._drafted = self.draft(hidden.detach(), embedded, **attention), following
        return hidden

    def take_drafted(self) -> tuple[Tensor, Following] | None:
        """Returns, once, the draft's hidden states [s / tp, b, h] of the last forward; None if it
        did not run."""
        drafted = self._drafted
        self._drafted = None
        return drafted

    def output_weight(self) -> Tensor:
        """Returns this rank's rows [padded vocab / tp, hidden]; on the last pipeline stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def sharded_state_dict(self, *args, **kwargs) -> dict[str, object]:
        """Returns the state by the names of GPTModel's checkpoints, in which an output layer has
        its weight alone."""
        state = super().sharded_state_dict(*args, **kwargs)
        return {
            name: part
            for name, part in state.items()
            if not name.endswith("output_layer._extra_state")
        }

    def _input_embedding(self) -> Tensor:
        """Returns this rank's rows [padded vocab / tp, hidden] of the input embedding; on the
        draft's stage."""
        if self.pre_process:
            return self.embedding.word_embeddings.weight
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        assert self.draft is not None and self.draft.embedding is not None
        return self.draft.embedding

    def _angles(self, hidden: Tensor | None, packed: PackedSeqParams | None) -> Tensor | None:
        """Returns the rotary angles of every position; None for latent attention, whose layers have
        their own."""
        if not hasattr(self, "rotary_pos_emb"):
            return None
        length = self.rotary_pos_emb.get_rotary_seq_len(
            None, self.decoder, hidden, self.config, packed
        )
        rows = {} if packed is None else {"packed_seq": True, "cp_group": packed.cp_group}
        angles = self.rotary_pos_emb(length, **rows)
        # YaRN's come with a factor, which is in softmax_scale already
        return angles[0] if isinstance(angles, tuple) else angles

    def _prepare_offloading(self) -> None:
        """Begins a forward of actor.megatron.fine_grained_activation_offloading, which keeps
        parameters on the GPU."""
        config = self.config
        if not config.fine_grained_activation_offloading:
            return
        Offloading.init_chunk_handler(
            pp_rank=self.pg_collection.pp.rank(),
            vp_size=config.virtual_pipeline_model_parallel_size,
            vp_stage=self.vp_stage,
            min_offloaded_tensor_size=config.min_offloaded_tensor_size,
            delta_offload_bytes_across_pp_ranks=config.delta_offload_bytes_across_pp_ranks,
            activation_offload_fraction=config.activation_offload_fraction,
            max_inflight_offloads=config.fine_grained_offloading_max_inflight_offloads,
        )
        if not self._marked:
            for parameter in self.parameters():
                Offloading.mark_not_offload(parameter)
            self._marked = True


def _rotary(
    arch: Architecture, config: TransformerConfig, context: ProcessGroup | None
) -> RotaryEmbedding:
    """Returns Megatron's rotary embedding: plain, with Llama 3's scaling, or YaRN's."""
    rotary = arch.attention.rotary
    common = {
        "kv_channels": config.kv_channels,
        "rotary_percent": rotary.fraction,
        "rotary_interleaved": config.rotary_interleaved,
        "rotary_base": rotary.theta,
        "use_cpu_initialization": config.use_cpu_initialization,
        "cp_group": context,
    }
    if yarn := rotary.yarn:
        return YarnRotaryEmbedding(
            **common,
            scaling_factor=yarn["factor"],
            original_max_position_embeddings=yarn["original_max_position_embeddings"],
            beta_fast=yarn["beta_fast"],
            beta_slow=yarn["beta_slow"],
            correction_range_round_to_int=yarn.get("truncate", True),
        )
    scaling = rotary.scaling
    return RotaryEmbedding(
        **common,
        rope_scaling=scaling is not None,
        rope_scaling_factor=scaling["factor"] if scaling else 8.0,
    )
