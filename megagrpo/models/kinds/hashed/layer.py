"""A router whose choice of experts is a table of the vocabulary (DeepSeek-V4, 2.1)."""

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class HashedRouter(TopKRouter):
    """Chooses by the token alone; its product still gives the experts' weights."""

    tokens: Tensor  # [b, s] of the forward under way, which the layer gets

    def __init__(self, vocab_size: int, **options):
        super().__init__(**options)
        table = torch.zeros(
            vocab_size, self.topk, dtype=torch.int64, device=torch.cuda.current_device()
        )
        self.register_buffer("table", table)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns weights and map [T, experts] of this rank's part of the sequence, from logits
        [s / tp, b, experts]."""
        own = self.tokens.t()
        if self.config.sequence_parallel:
            parts = mpu.get_tensor_model_parallel_world_size()
            own = own.chunk(parts)[mpu.get_tensor_model_parallel_rank()]
        return topk_routing_with_score_function(
            logits.flatten(0, 1),
            self.topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            precomputed_indices=self.get_buffer("table")[own.flatten()],
        )
