"""The vision tower on the first pipeline stage, and how its features come into the decoder.

The tower is transformers' own module, whole on every tensor- and context-parallel rank.
Tensor-parallel ranks compute the same gradient of it; context-parallel ranks that of their own
tokens, and Megatron sums these.
"""

import importlib
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megagrpo.models.architecture import Architecture
from megagrpo.models.kinds.vision.describe import Trained, Vision
from megagrpo.models.layers.rotary import section_angles
from megagrpo.system.torchvision import prepare_torchvision
from megagrpo.types import MicroBatch, on_device

Grid = tuple[int, int, int]
# module of transformers -> class of its tower; Qwen3-VL-MoE's is Qwen3-VL's
_TOWERS = {
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_vl": "Qwen3VLVisionModel",
}


def build_tower(vision: Vision) -> torch.nn.Module:
    """Returns transformers' module with random weights; what is not trained has no gradient."""
    prepare_torchvision()
    kind = vision.kind
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    tower = getattr(module, _TOWERS[kind])
    tower_config = {
        key: value
        for key, value in vision.config.items()
        if key not in ("model_type", "dtype", "torch_dtype")
    }
    return tower._from_config(tower.config_class(**tower_config), attn_implementation="sdpa")


class Tower(torch.nn.Module):
    """Computes the features of images; its parameters are those of transformers' module, under the
    same names."""

    def __init__(self, vision: Vision, trained: Trained, recompute: bool):
        super().__init__()
        self.vision = vision
        self.module = build_tower(vision)
        # no buffer: nothing casts it
        self._frequencies = self.module.get_buffer("rotary_pos_emb.inv_freq").clone()
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(vision.trains(vision.prefix + name, trained))
            # Every tensor-parallel rank computes the same gradient. Megatron averages it, which
            # keeps the ranks' bits together.
            parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]  # read by Megatron
        self.is_trained = any(p.requires_grad for p in self.module.parameters())
        if recompute and trained == "all":
            reentrant = {"use_reentrant": False, "preserve_rng_state": False}
            self.module.gradient_checkpointing_enable(reentrant)  # type: ignore[operator]

    def forward(self, pixels: Tensor, grids: list[Grid]) -> list[Tensor]:
        """Returns the features [F, h] of images, and those for the first layers, from pixels [P,
        values] of patches."""
        grid = torch.tensor(grids)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.is_trained):
            dtype = next(self.module.parameters()).dtype
            found = self.module(
                pixels.to(dtype), grid_thw=grid, **self._planned(grid, pixels.device)
            )
        return [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]

    def _planned(self, grid: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Computes on the host what follows from grids; lengths stay there, where torch's attention
        reads them."""
        from transformers import vision_utils

        vision = self.vision
        merge = vision.merge
        planned = {
            "position_ids": on_device(vision_utils.get_vision_position_ids(grid, merge), device)
        }
        planned["cu_seqlens"] = vision_utils.get_vision_cu_seqlens(grid)
        if vision.kind == "qwen2_5_vl":
            window = vision.config["window_size"]
            index, bounds = vision_utils.get_vision_window_index(grid, merge, window, vision.patch)
            return planned | {"window_index": on_device(index, device), "cu_window_seqlens": bounds}
        side = int(vision.num_positions**0.5)
        indices, weights = vision_utils.get_vision_bilinear_indices_and_weights(grid, side, merge)
        corners = {"bilinear_indices": indices, "bilinear_weights": weights}
        return planned | {name: on_device(tensor, device) for name, tensor in corners.items()}

    def load_hf(self, hf: Mapping[str, Tensor]) -> None:
        """Copies the tower's HF tensors into its parameters (recordable)."""
        for name, parameter in self.module.named_parameters():
            parameter.copy_(hf[self.vision.prefix + name])

    def keep_float32(self) -> None:
        """Restores the frequencies of rotary embedding after a cast: rounded, they would turn by
        other angles."""
        rotary = self.module.get_submodule("rotary_pos_emb")
        rotary.inv_freq = self._frequencies.to(
            self.module.get_buffer("rotary_pos_emb.inv_freq").device
        )


class Sight:
    """The image inputs of one micro-batch: rotary angles of its tokens, features of its images and
    their places."""

    def __init__(
        self, arch: Architecture, images: Callable[[str], Tensor] | None, micro: MicroBatch
    ):
        """micro: on the device. images: pixels [patches, values] by an image's key, on the host."""
        assert (
            arch.vision is not None
            and micro.images is not None
            and micro.rope_positions is not None
        )
        self._vision = arch.vision
        self._images = images
        self._micro = micro
        vision = arch.vision
        device = micro.tokens.device
        angles = section_angles(
            micro.rope_positions,
            arch.attention.head_dim,
            arch.attention.rotary.theta,
            vision.mrope_section,
            vision.mrope_interleaved,
        )
        # as rotate_packed takes those of tokens
        self.angles = angles if micro.cu_seqlens is None else angles[:, 0]
        self._deep: list[Tensor] = []  # features that layer i adds to its output
        height, width = micro.tokens.shape
        # in [s, b], as decoders have it
        where = micro.images.places % width * height + micro.images.places // width
        self._places = on_device(where, device)
        self._rows = on_device(micro.images.rows, device)
        # sequence parallelism cuts the sequence
        part = height * width // mpu.get_tensor_model_parallel_world_size()
        first = part * mpu.get_tensor_model_parallel_rank()
        own = (where >= first) & (where < first + part)
        self._own_places = on_device(where[own] - first, device)
        self._own_rows = on_device(micro.images.rows[own], device)

    def with_features(self, embedded: Tensor, tower: Tower) -> Tensor:
        """Returns the decoder's input [s / tp, b, h] from the embeddings [s, b, h] of all tokens,
        images inserted."""
        refs = self._micro.images.refs if self._micro.images else ()
        hidden = embedded
        if refs:
            assert self._images is not None, (
                "MegatronActor.images is not set, and a prompt has images"
            )
            pixels = torch.cat([self._images(ref.key) for ref in refs])
            features = tower(on_device(pixels, embedded.device), [ref.grid for ref in refs])
            flat = embedded.flatten(0, 1).index_put(
                (self._places,), features[0][self._rows].to(embedded.dtype)
            )
            hidden = flat.view_as(embedded)
            hidden = self._with_deep(hidden, features[1:])
        elif tower.is_trained and torch.is_grad_enabled():
            # every rank's parameters take part in the reduction of gradients, in every micro-batch
            merge = self._vision.merge
            none = torch.zeros(merge**2, self._vision.patch_values, device=embedded.device)
            hidden = embedded + sum(part.sum() * 0.0 for part in tower(none, [(1, merge, merge)]))
        if mpu.get_tensor_model_parallel_world_size() > 1:
            hidden = scatter_to_sequence_parallel_region(hidden)
        return hidden

    def _with_deep(self, hidden: Tensor, features: list[Tensor]) -> Tensor:
        """Leaves the features of the first layers for these, as leaves of the graph where they are
        trained.

        A recomputed layer is differentiated by itself. Were the tower part of its graph, the
        backward would go through the tower once for each of these layers.
        """
        self._deep = features
        if not any(part.requires_grad for part in features):
            return hidden
        self._deep = [part.detach().requires_grad_() for part in features]
        return _ThroughLeaves.apply(hidden, self._deep, *features)

    def with_deep(self, index: int, hidden: Tensor) -> Tensor:
        """Returns the output [s / tp, b, h] of layer `index` with features added to image tokens,
        if it adds any."""
        if index >= len(self._deep):
            return hidden
        added = self._deep[index][self._own_rows].to(hidden.dtype)
        rows = self._own_places // hidden.shape[1], self._own_places % hidden.shape[1]
        # no view: Megatron frees what a stage has sent
        return hidden.index_put(rows, added, accumulate=True)


class _ThroughLeaves(torch.autograd.Function):
    """Hands hidden states on; its backward gives features the gradients that their leaves got in
    later layers.

    It comes after the backward of these layers, which its output goes through; a leaf's gradient is
    there as soon as that of its layer's output is.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, leaves: list[Tensor], *features: Tensor) -> Tensor:
        ctx.leaves = leaves
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        found = torch.stack([leaf.grad for leaf in ctx.leaves])
        if mpu.get_tensor_model_parallel_world_size() > 1:  # each had its part of the sequence
            dist.all_reduce(found, group=mpu.get_tensor_model_parallel_group())
        return gradient, None, *found.unbind()


class SeeingLayer(TransformerLayer):
    """A decoder layer that adds features of images to its output, if it is one of the first ones of
    such a model.

    The Sight comes as `attention_bias`, which no attention here has: the block hands it to every
    layer as it is, in a recomputed forward that of the same micro-batch.
    """

    def forward(
        self, *args, attention_bias: Sight | None = None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """As TransformerLayer's."""
        hidden, context = super().forward(*args, **kwargs)
        if attention_bias is not None:
            hidden = attention_bias.with_deep(self.layer_number - 1, hidden)
        return hidden, context
