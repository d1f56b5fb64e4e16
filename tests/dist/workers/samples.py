"""One batch of made-up samples, the same in every process of the actor's tests."""

import torch

VOCAB = 131  # not divisible by any tensor-parallel size: padded vocabularies everywhere
NUM_SAMPLES, WIDTH = 7, 40
LENGTHS, PROMPTS = (40, 7, 23, 12, 31, 9, 18), (5, 3, 10, 2, 8, 4, 6)


def samples() -> dict[str, torch.Tensor]:
    """tokens, mask (with a hole), advantages, noise [NUM_SAMPLES, WIDTH]; lengths, prompts
    [NUM_SAMPLES]."""
    generator = torch.Generator().manual_seed(1)
    lengths, prompts = torch.tensor(LENGTHS), torch.tensor(PROMPTS)
    column = torch.arange(WIDTH)
    inside = column < lengths[:, None]
    mask = (inside & (column >= prompts[:, None])).float()
    mask[0, 20:23] = 0.0
    tokens = torch.randint(0, VOCAB, (NUM_SAMPLES, WIDTH), generator=generator) * inside
    advantages = torch.randn(NUM_SAMPLES, 1, generator=generator).expand(NUM_SAMPLES, WIDTH) * mask
    noise = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
    return {
        "tokens": tokens,
        "lengths": lengths,
        "prompts": prompts,
        "mask": mask,
        "advantages": advantages,
        "noise": noise,
    }
