"""Images in micro-batches: the positions of their tokens for rotary embedding, and where their
features go.

Both follow from where a prompt has its images, never from token ids: a placeholder that the policy
sampled is text.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megagrpo.types import Batch, ImageRef, MicroBatch, MicroImages


def rotary_positions(length: int, images: Sequence[ImageRef], merge: int) -> Tensor:
    """Returns the positions [3, length] of a sample's tokens in time, height and width, as Qwen2-VL
    counts them.

    Text goes on by one in all three; an image's tokens begin where the text stopped, and text after
    it behind the larger of its sides. images: in the order of their tokens. arXiv 2409.12191,
    section 2.1.
    """
    parts = []
    token = 0
    position = 0
    for image in images:
        text = image.start - token
        parts.append(torch.arange(position, position + text).expand(3, -1))
        position += text
        time, height, width = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
        axes = torch.meshgrid(
            torch.arange(time), torch.arange(height), torch.arange(width), indexing="ij"
        )
        parts.append(torch.stack([axis.flatten() for axis in axes]) + position)
        token, position = image.start + time * height * width, position + max(height, width)
    return torch.cat([*parts, torch.arange(position, position + length - token).expand(3, -1)], 1)


def with_images(batch: Batch, micro: MicroBatch, merge: int) -> MicroBatch:
    """Returns a micro-batch, on the host, with its rotary positions and images."""
    members = micro.members.tolist()
    images = [batch.images[member] if batch.images else () for member in members]
    lengths = batch.lengths[micro.members]
    positions = [
        rotary_positions(length, refs, merge)
        for length, refs in zip(lengths.tolist(), images, strict=True)
    ]
    feature, refs = _features(lengths, images, merge)
    # for each place of this rank: its token among those of the members, the last for padding
    starts = torch.full((len(batch.lengths) + 1,), -1)
    starts[micro.members] = lengths.cumsum(0) - lengths
    token = torch.where(micro.rows >= 0, starts[micro.rows] + micro.columns, len(feature) - 1)
    everywhere = torch.cat([*positions, torch.zeros(3, 1, dtype=torch.int64)], 1)
    rope = torch.where(micro.rows >= 0, everywhere[:, token], micro.positions)
    features = feature[token].flatten()
    places = torch.nonzero(features >= 0).flatten()
    return replace(micro, rope_positions=rope, images=MicroImages(refs, features[places], places))


def _features(
    lengths: Tensor, images: Sequence[Sequence[ImageRef]], merge: int
) -> tuple[Tensor, tuple[ImageRef, ...]]:
    """Returns the feature row of every token, [t + 1], or -1 if it has none, and the distinct
    images."""
    first: dict[str, tuple[int, ImageRef]] = {}  # by key: the first row, any reference
    feature = torch.full((int(lengths.sum()) + 1,), -1)
    start = 0
    count = 0
    for length, member_images in zip(lengths.tolist(), images, strict=True):
        for image in member_images:
            tokens = math.prod(image.grid) // merge**2
            if image.key not in first:
                first[image.key] = (count, image)
                count += tokens
            assert image.start + tokens <= length, (
                f"an image at token {image.start} ends behind its sample"
            )
            row = first[image.key][0]
            feature[start + image.start : start + image.start + tokens] = torch.arange(
                row, row + tokens
            )
        start += length
    return feature, tuple(image for _, image in first.values())
