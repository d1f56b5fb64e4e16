"""Vision towers: their numbers from config.json, and the tensors of their checkpoints by
arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from megagrpo.models.config_json import HfConfig
from megagrpo.models.tensors import TensorSpec

# what of a tower is trained: nothing, its mergers, or everything
Trained = Literal["none", "projector", "all"]
# What vision_config may leave out, as fine-tunes do that hold only what differs: the defaults of
# transformers' Qwen2_5_VLVisionConfig and Qwen3VLVisionConfig (Qwen3VLMoeVisionConfig has the
# same).
_BOTH: dict[str, object] = {
    "num_heads": 16,
    "out_hidden_size": 3584,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_DEFAULTS: dict[str, dict[str, object]] = {
    "qwen2_5_vl": {
        **_BOTH,
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_vl": {
        **_BOTH,
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}
_ID_KEYS = ("image_token_id", "video_token_id", "vision_start_token_id")


@dataclass(frozen=True)
class Vision:
    """Holds the numbers of a model's vision tower, and of the positions that images have in its
    text part."""

    kind: Literal["qwen2_5_vl", "qwen3_vl"]
    prefix: str  # begins the names of the tower's tensors
    depth: int
    hidden_size: int
    ffn_size: int
    out_size: int  # of a feature: the text part's hidden size
    patch: int  # pixels on a side
    temporal_patch: int  # frames
    merge: int  # patches of one token on a side
    channels: int
    num_positions: int  # learned ones; 0: none
    deepstack: int  # first layers of the text part behind which features are added to image tokens
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    # frequencies that turn with time, height and width; half a head together
    mrope_section: tuple[int, int, int]
    mrope_interleaved: bool  # they alternate; else one block each
    # vision_config of config.json with defaults, for transformers' class
    config: HfConfig = field(hash=False)

    @classmethod
    def read(cls, hf: HfConfig, kind: Literal["qwen2_5_vl", "qwen3_vl"]) -> Vision:
        """Reads a config.json without refusals."""
        tower: HfConfig = {**_DEFAULTS[kind], **hf["vision_config"]}
        rope = _mrope_of(hf)
        return cls(
            kind=kind,
            prefix="visual." if kind == "qwen2_5_vl" else "model.visual.",
            depth=tower["depth"],
            hidden_size=tower["hidden_size"],
            ffn_size=tower["intermediate_size"],
            out_size=tower["out_hidden_size"],
            patch=tower["patch_size"],
            temporal_patch=tower["temporal_patch_size"],
            merge=tower["spatial_merge_size"],
            channels=tower.get("in_channels", 3),
            num_positions=tower["num_position_embeddings"] if kind == "qwen3_vl" else 0,
            deepstack=len(tower["deepstack_visual_indexes"]) if kind == "qwen3_vl" else 0,
            **{key: hf[key] for key in _ID_KEYS},
            mrope_section=tuple(rope["mrope_section"]),
            mrope_interleaved=bool(rope.get("mrope_interleaved", False)),
            config=tower,
        )

    @property
    def patch_values(self) -> int:
        """Counts the values of one patch as image processors give it."""
        return self.channels * self.temporal_patch * self.patch**2

    @cached_property
    def products_of_a_patch(self) -> int:
        """Counts the multiply-adds of a patch with the tower's matrices; a merger takes merge**2
        patches at once."""
        matrices = [
            spec
            for spec in self.tensors()
            if spec.kind == "matrix" and "pos_embed" not in spec.name
        ]
        return sum(
            spec.size // (self.merge**2 if "merger" in spec.name else 1) for spec in matrices
        )

    def engine_weights(self, tp: int) -> float:
        """Counts the weights of the tower that one rank of an engine holds.

        Matrices of blocks and mergers, and biases of their outputs, are divided; embeddings of
        patches and biases behind a sum over ranks are whole.
        """
        numbers = 0.0
        for spec in self.tensors():
            *_, module, kind = spec.name.split(".")
            summed = module in ("proj", "down_proj", "linear_fc2", "2") and kind == "bias"
            whole = summed or "norm" in f"{spec.kind} {spec.name}" or "patch_embed" in spec.name
            numbers += spec.size / (1 if whole else tp)
        return numbers

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """Counts the tokens of an image of `grid` patches: time, height, width."""
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def tensors(self) -> Iterator[TensorSpec]:
        """Yields the tensors of a tower in the order of transformers' module."""
        width = self.hidden_size
        prefix = self.prefix
        patches = (width, self.channels, self.temporal_patch, self.patch, self.patch)
        yield TensorSpec(prefix + "patch_embed.proj.weight", patches, "matrix")
        if self.kind == "qwen3_vl":
            yield TensorSpec(prefix + "patch_embed.proj.bias", (width,), "bias")
            yield TensorSpec(prefix + "pos_embed.weight", (self.num_positions, width), "matrix")
        for index in range(self.depth):
            yield from self._block(f"{prefix}blocks.{index}.")
        merged = width * self.merge**2
        if self.kind == "qwen2_5_vl":
            yield TensorSpec(prefix + "merger.ln_q.weight", (width,), "norm")
            yield from _linear(prefix + "merger.mlp.0", merged, merged)
            yield from _linear(prefix + "merger.mlp.2", self.out_size, merged)
            return
        names = [
            ("merger", width),
            *((f"deepstack_merger_list.{index}", merged) for index in range(self.deepstack)),
        ]
        for name, normed in names:
            yield TensorSpec(f"{prefix}{name}.norm.weight", (normed,), "norm")
            yield TensorSpec(f"{prefix}{name}.norm.bias", (normed,), "bias")
            yield from _linear(f"{prefix}{name}.linear_fc1", merged, merged)
            yield from _linear(f"{prefix}{name}.linear_fc2", self.out_size, merged)

    def _block(self, prefix: str) -> Iterator[TensorSpec]:
        width = self.hidden_size
        ffn = self.ffn_size
        for name in ("norm1", "norm2"):
            yield TensorSpec(f"{prefix}{name}.weight", (width,), "norm")
            if self.kind == "qwen3_vl":
                yield TensorSpec(f"{prefix}{name}.bias", (width,), "bias")
        yield from _linear(prefix + "attn.qkv", 3 * width, width)
        yield from _linear(prefix + "attn.proj", width, width)
        names: tuple[str, ...] = ("linear_fc1", "linear_fc2")
        if self.kind == "qwen2_5_vl":
            names = ("gate_proj", "up_proj", "down_proj")
        for name in names[:-1]:
            yield from _linear(f"{prefix}mlp.{name}", ffn, width)
        yield from _linear(f"{prefix}mlp.{names[-1]}", width, ffn)

    def owns(self, name: str) -> bool:
        """Tells whether an HF tensor is one of the tower's."""
        return name.startswith(self.prefix)

    def trains(self, name: str, trained: Trained) -> bool:
        """Tells whether an HF tensor has a gradient, whatever else is trained; tensors of the text
        part have."""
        if not self.owns(name) or trained == "all":
            return True
        return trained == "projector" and "merger" in name.removeprefix(self.prefix).split(".")[0]


def vision_refusals(hf: HfConfig, kind: str) -> list[str]:
    """Returns what of a config.json keeps its vision part from being computed."""
    if not isinstance(hf.get("vision_config"), Mapping):
        return ["config.json lacks vision_config"]
    tower = {**_DEFAULTS[kind], **hf["vision_config"]}
    problems = [f"config.json lacks {key}" for key in _ID_KEYS if key not in hf]
    section = _mrope_of(hf).get("mrope_section", ())
    if not section:
        problems.append("config.json lacks mrope_section in its rope_scaling or rope_parameters")
    if problems:
        return problems
    width = hf["hidden_size"]
    half = (hf.get("head_dim") or width // hf["num_attention_heads"]) // 2
    if len(section) != 3 or sum(section) != half:
        problems.append(
            f"mrope_section {section} must be three numbers with the sum {half}, half a head"
        )
    if tower["out_hidden_size"] != width:
        problems.append(
            f"vision_config.out_hidden_size {tower['out_hidden_size']} is not hidden_size {width}"
        )
    return problems


def _mrope_of(hf: HfConfig) -> dict:
    """Returns the settings of rotary embedding that name sections; {} without any."""
    found = [hf.get(key) for key in ("rope_scaling", "rope_parameters")]
    return next(
        (dict(rope) for rope in found if isinstance(rope, Mapping) and "mrope_section" in rope), {}
    )


def _linear(name: str, outputs: int, inputs: int) -> Iterator[TensorSpec]:
    yield TensorSpec(name + ".weight", (outputs, inputs), "matrix")
    yield TensorSpec(name + ".bias", (outputs,), "bias")
