"""Log-probabilities and entropy with backward: chunked, plain autograd, and cross entropies of
other libraries."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.gpu_kit.figures import Figures, Setting
from bench.gpu_kit.timing import peak_bytes, seconds_of
from megagrpo.algo.logprob import VocabularyShard, chunked_logprobs

TOKENS, HIDDEN, VOCAB, CHUNK = 4096, 2048, 151_936, 2048
SMALL = (64, 32, 9000, 32)  # two tiles of columns
FLOAT32_BOUND, BFLOAT16_BOUND = 1e-5, 2e-2  # largest difference over the largest value
MEMORY = {
    "float32": 1 / 8,
    "bfloat16": 3 / 8,
}  # of two float32 matrices of logits; the weight's gradient is summed there


def head(figures: Figures, setting: Setting) -> None:
    """Compares values and gradients with plain autograd over whole logits, in both dtypes; then
    times and memory.

    The other libraries compute log-probabilities alone.
    """
    tokens, hidden, vocab, chunk = setting.of((TOKENS, HIDDEN, VOCAB, CHUNK), SMALL)
    device = setting.torch_device()

    def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return chunked_logprobs(hidden, weight, targets, 1.0, chunk, VocabularyShard(vocab))

    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        inputs = _inputs(tokens, hidden, vocab, dtype, device)
        chunked = partial(_both, ours, *inputs)
        plain = partial(_both, plain_logprobs, *inputs)
        found, expected = chunked(), plain()
        gap = max(_largest(a, b) for a, b in zip(found, expected, strict=True))
        bound = FLOAT32_BOUND if dtype == torch.float32 else BFLOAT16_BOUND
        figures.add(
            f"{name}: chunked against plain, relative", gap, "", "values and gradients", bound
        )
        kept = sum(t.nbytes for t in found)
        del found, expected
        work = {"chunked": chunked, "plain autograd": plain}
        work |= {"chunked, no entropy": partial(_alone, lambda h, w, t: ours(h, w, t)[0], *inputs)}
        work |= {
            title: partial(_alone, one, *inputs)
            for title, one in others(figures, name, device).items()
        }
        for title, one in work.items():
            beyond = _measure(figures, f"{name}: {title}", one, inputs)
            if beyond is not None and setting.device == "cuda":
                share = (beyond - kept) / (2 * 4 * tokens * vocab)
                bound = MEMORY[name] if title == "chunked" else None
                note = "of two float32 matrices of logits"
                figures.add("  memory beyond inputs and gradients", share, "", note, bound)


def _measure(
    figures: Figures, title: str, work: Callable, inputs: tuple[Tensor, ...]
) -> int | None:
    """Takes down seconds; returns the peak in bytes beyond the inputs, None where it cannot run."""
    device = inputs[0].device
    try:
        seconds = seconds_of(work, device)
        inputs[0].grad = inputs[1].grad = None
        beyond = peak_bytes(work, device)
    except (
        RuntimeError,
        TypeError,
        ValueError,
        ImportError,
    ) as exc:  # a library that cannot run here, or lacks memory
        figures.add(
            title,
            None,
            note=f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}",
        )
        return None
    figures.add(title, seconds, "s")
    return beyond


def others(
    figures: Figures, dtype: str, device: torch.device
) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Returns what else can be measured here: cross entropies, [T] or their sum, of hidden, weight
    and targets."""
    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
    for title, make in {
        "torch's linear_cross_entropy": _torch,
        "Liger": _liger,
        "cut cross entropy": _cut,
        "flash-attn over logits": _flash,
    }.items():
        try:
            found[title] = make()
        except (ImportError, AttributeError, RuntimeError) as exc:
            figures.add(f"{dtype}: {title}", None, note=f"not here: {exc}")
    return found


def _torch() -> Callable:
    from torch.nn import LinearCrossEntropyOptions
    from torch.nn.functional import linear_cross_entropy

    return lambda h, w, t: linear_cross_entropy(
        h, w, t, reduction="sum", options=LinearCrossEntropyOptions()
    )


def _liger() -> Callable:
    from liger_kernel.transformers.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyLoss,
    )

    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda h, w, t: loss(w, h, t)


def _cut() -> Callable:
    from cut_cross_entropy import linear_cross_entropy

    return lambda h, w, t: linear_cross_entropy(h, w, t, reduction="none")


def _flash() -> Callable:
    from flash_attn.losses.cross_entropy import CrossEntropyLoss

    loss = CrossEntropyLoss(reduction="none")
    return lambda h, w, t: loss(h @ w.t(), t)


def plain_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities and entropies [T] from whole logits, whose product is the input's
    dtype's."""
    logp = torch.log_softmax((hidden @ weight.T).float(), -1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def _inputs(
    tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(0)
    states = (
        torch.randn(tokens, hidden, generator=generator, device=device).to(dtype).requires_grad_()
    )
    weight = torch.randn(vocab, hidden, generator=generator, device=device) / hidden**0.5
    targets = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
    return states, weight.to(dtype).requires_grad_(), targets


def _both(
    function: Callable, hidden: Tensor, weight: Tensor, targets: Tensor
) -> tuple[Tensor, ...]:
    hidden.grad = weight.grad = None
    logprobs, entropy = function(hidden, weight, targets)
    (logprobs.sum() + 0.5 * entropy.sum()).backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def _alone(function: Callable, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    hidden.grad = weight.grad = None
    function(hidden, weight, targets).sum().backward()


def _largest(mine: Tensor, exact: Tensor) -> float:
    return float((mine.float() - exact.float()).abs().max() / exact.float().abs().max())
