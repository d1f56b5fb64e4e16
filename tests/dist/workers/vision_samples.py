"""Made-up samples with 0, 1, 2 and 3 images of several sizes, the same in every process of the vision tests."""

import torch

from megagrpo.types import ImageRef
from tests.tiny_vlm import VOCABULARY

VOCAB = 96
GRIDS = {"a": (1, 4, 4), "b": (1, 2, 6), "c": (1, 8, 4), "d": (1, 2, 2)}  # patches; 4, 3, 8 and 1 tokens
# of each sample: tokens before each image, with the token that says that one begins; then the response's tokens
LAYOUTS = (
    ((("a", 3),), 9),
    ((), 14),
    ((("b", 2), ("c", 4)), 12),
    ((("c", 5),), 7),
    ((("a", 3),), 6),  # the image of the first sample
    ((("d", 1), ("a", 2), ("b", 3)), 10),
    ((), 5),
)
NUM_SAMPLES, TEXT = len(LAYOUTS), 3  # tokens of the prompt behind the last image
PAD = VOCABULARY["<|image_pad|>"]
SAMPLED_PADS = ((0, 2), (1, 3), (3, 1))  # sample, response token: the policy sampled a placeholder


def tokens_of(name: str) -> int:
    time, height, width = GRIDS[name]
    return time * height * width // 4


def pixels(name: str, values: int) -> torch.Tensor:
    """Those of one image, [patches, values]."""
    time, height, width = GRIDS[name]
    generator = torch.Generator().manual_seed(ord(name))
    return torch.randn(time * height * width, values, generator=generator)


def images_of(number: int) -> tuple[ImageRef, ...]:
    found, token = [], 0
    for name, before in LAYOUTS[number][0]:
        found.append(ImageRef(name, token + before, GRIDS[name]))
        token += before + tokens_of(name)
    return tuple(found)


def samples() -> dict[str, torch.Tensor]:
    """tokens, mask, advantages, noise [NUM_SAMPLES, WIDTH]; lengths, prompts [NUM_SAMPLES]; seen:
    image tokens."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.tensor([sum(b + tokens_of(n) for n, b in images) + TEXT for images, _ in LAYOUTS])
    lengths = prompts + torch.tensor([response for _, response in LAYOUTS])
    column = torch.arange(int(lengths.max()))
    inside = column < lengths[:, None]
    mask = (inside & (column >= prompts[:, None])).float()
    tokens = torch.randint(10, VOCAB, mask.shape, generator=generator) * inside
    seen = torch.zeros_like(inside)
    for number in range(NUM_SAMPLES):
        for image in images_of(number):
            tokens[number, image.start - 1] = VOCABULARY["<|vision_start|>"]
            seen[number, image.start : image.start + tokens_of(image.key)] = True
    tokens[seen] = PAD
    for number, place in SAMPLED_PADS:
        tokens[number, int(prompts[number]) + place] = PAD
    advantages = torch.randn(NUM_SAMPLES, 1, generator=generator) * mask
    noise = torch.randn(mask.shape, generator=generator)
    return {
        "tokens": tokens,
        "lengths": lengths,
        "prompts": prompts,
        "mask": mask,
        "advantages": advantages,
        "noise": noise,
        "seen": seen,
    }
