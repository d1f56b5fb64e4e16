"""Log-probabilities and entropy from hidden states and output weight, without materializing
[tokens, vocabulary].

Logits are made in tiles of at most chunk_tokens x TILE_COLUMNS, used and forgotten, once in the
forward and once more in the backward. A running softmax joins the tiles, and the same rule joins
the vocabulary shards of tensor-parallel ranks, so two all-reduces serve the whole call. All
arithmetic on logits is float32.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.algo.statistics import Reduce

TILE_COLUMNS = 8192
_LOWEST = torch.finfo(torch.float32).min


class VocabularyShard(NamedTuple):
    """The rows of the output weight that a tensor-parallel rank has: the vocabulary from `start`
    on."""

    size: int  # of the real vocabulary; columns beyond it are padding
    start: int = 0
    # over tensor-parallel ranks, which must all see the same hidden and targets
    reduce: Reduce | None = None

    def columns(self, weight: Tensor) -> int:
        """Counts the rows of weight [V_local, H] that are not padding."""
        return max(0, min(len(weight), self.size - self.start))


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
    shard: VocabularyShard,
) -> tuple[Tensor, Tensor]:
    """Collective over tensor-parallel ranks. Returns log-probabilities of the targets, float32 in
    their shape, and entropies [T].

    The distribution is softmax(hidden weight^T / temperature), values are in nats. hidden [T, H];
    weight [V_local, H]; targets [T], or [T, k] for several per position, int64 ids in the whole
    vocabulary. chunk_tokens: rows of a tile. The gradient of hidden is this rank's PARTIAL sum over
    its columns, which the caller must all-reduce or reduce-scatter; the gradient of weight is
    complete.
    """
    options = (temperature, chunk_tokens, shard.columns(weight))
    several = targets if targets.dim() > 1 else targets[:, None]
    logprobs, entropy = _LogProbs.apply(
        hidden, weight, several - shard.start, options, shard.reduce
    )
    return logprobs.view(targets.shape), entropy


class _Gradients:
    """The gradients of hidden states and output weight, summed in float32 over the tiles."""

    def __init__(self, ctx, hidden: Tensor, weight: Tensor):
        self._inputs = hidden, weight
        self._hidden = torch.zeros_like(hidden, dtype=torch.float32)
        self._weight = None
        # frozen under adapters: then its gradient, as large as the largest weight, is not computed
        if ctx.needs_input_grad[1]:
            self._weight = torch.zeros_like(weight, dtype=torch.float32)

    def add(self, rows: slice, cols: slice, grad: Tensor) -> None:
        """Adds a tile's gradient of the logits, [rows, cols]."""
        hidden, weight = self._inputs
        _accumulate(self._hidden[rows], grad, weight[cols])
        if self._weight is not None:
            _accumulate(self._weight[cols], grad.t(), hidden[rows])

    def outputs(self) -> tuple[Tensor | None, ...]:
        """Returns the gradients of all inputs of _FullKl; autograd takes more than _LogProbs has."""
        hidden, weight = self._inputs
        grad_weight = self._weight
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return self._hidden.to(hidden.dtype), grad_weight, *[None] * 4


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, local_targets, options, reduce):
        top = hidden.new_full(hidden.shape[:1], _LOWEST, dtype=torch.float32)
        mass, moment = (torch.zeros_like(top) for _ in range(2))
        chosen = torch.zeros_like(local_targets, dtype=torch.float32)  # [T, k]
        for rows, cols, logits in _tiles(hidden, weight, *options):
            inside, index = _targets_in(local_targets[rows], cols)
            chosen[rows] += logits.gather(1, index).masked_fill_(~inside, 0.0)
            # moment = sum (l - top) e^(l - top)
            new_top = torch.maximum(top[rows], logits.amax(1))
            shift = top[rows] - new_top
            earlier = shift.exp()
            logits -= new_top[:, None]
            shifted = logits.clone()
            logits.exp_()
            moment[rows] = (moment[rows] + shift * mass[rows]) * earlier
            moment[rows] += torch.linalg.vecdot(logits, shifted)
            mass[rows] = mass[rows] * earlier + logits.sum(1)
            top[rows] = new_top
        if reduce is not None:
            shift = top
            top = reduce(top.clone(), "max")
            shift -= top
            local = torch.stack((mass, moment + shift * mass, *chosen.unbind(1)))
            local[:2] *= shift.exp()
            summed = reduce(local, "sum")
            mass, moment = summed[:2]
            chosen = summed[2:].T
        log_mass = mass.log()
        log_z = top + log_mass
        entropy = log_mass - moment / mass
        ctx.save_for_backward(hidden, weight, local_targets, log_z, entropy)
        ctx.options = options
        # what the loss does not use has no gradient, and costs nothing in backward
        ctx.set_materialize_grads(False)
        return chosen - log_z[:, None], entropy

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy):
        hidden, weight, local_targets, log_z, entropy = ctx.saved_tensors
        scale_targets, scale_entropy = (
            None if grad is None else grad / ctx.options[0] for grad in (grad_logprob, grad_entropy)
        )
        if scale_targets is None:
            scale_targets = torch.zeros_like(local_targets, dtype=torch.float32)
        scale_logprob = scale_targets.sum(1)
        gradients = _Gradients(ctx, hidden, weight)
        for rows, cols, logits in _tiles(hidden, weight, *ctx.options):
            logits -= log_z[rows, None]  # log p
            # d logprob = onehot - p, d entropy = -p (log p + H), both over temperature
            if scale_entropy is not None:
                factor = (
                    (logits + entropy[rows, None])
                    .mul_(scale_entropy[rows, None])
                    .add_(scale_logprob[rows, None])
                )
                grad = logits.exp_().mul_(factor).neg_()
            else:
                grad = logits.exp_().mul_(-scale_logprob[rows, None])
            inside, index = _targets_in(local_targets[rows], cols)
            grad.scatter_add_(1, index, scale_targets[rows] * inside)
            gradients.add(rows, cols, grad)
        return gradients.outputs()


def chunked_full_kl(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    temperature: float,
    chunk_tokens: int,
    shard: VocabularyShard,
) -> Tensor:
    """Collective over tensor-parallel ranks. Returns the exact KL(policy || reference) of every
    position, float32 [T].

    It covers the whole vocabulary, in nats, and comes from the hidden states and output weights of
    both models. Arguments as for chunked_logprobs; the reference's [T, H'] and [V_local, H'] get no
    gradient.
    """
    options = (temperature, chunk_tokens, shard.columns(weight))
    return _FullKl.apply(hidden, weight, ref_hidden, ref_weight, options, shard.reduce)


class _FullKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, ref_hidden, ref_weight, options, reduce):
        top, ref_top = hidden.new_full((2, len(hidden)), _LOWEST, dtype=torch.float32)
        mass, ref_mass, moment = torch.zeros(
            3, len(hidden), dtype=torch.float32, device=hidden.device
        )
        ctx.options = options
        pairs = _pairs(options, (hidden, weight), (ref_hidden, ref_weight))
        for (rows, _, logits), (_, _, ref_logits) in pairs:
            gap = logits - ref_logits
            earlier = _add_tile(top[rows], mass[rows], logits)
            moment[rows] = moment[rows] * earlier + torch.linalg.vecdot(logits, gap)
            _add_tile(ref_top[rows], ref_mass[rows], ref_logits)
        if reduce is not None:
            tops = torch.stack((top, ref_top))
            highest = reduce(tops.clone(), "max")
            factor = (tops - highest).exp()
            mass, moment, ref_mass = reduce(
                torch.stack((mass * factor[0], moment * factor[0], ref_mass * factor[1])), "sum"
            )
            top, ref_top = highest
        log_z, ref_log_z = top + mass.log(), ref_top + ref_mass.log()
        kl = moment / mass - log_z + ref_log_z
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, log_z, ref_log_z, kl)
        return kl

    @staticmethod
    def backward(ctx, grad_kl):
        hidden, weight, ref_hidden, ref_weight, log_z, ref_log_z, kl = ctx.saved_tensors
        gradients = _Gradients(ctx, hidden, weight)
        scale = grad_kl / ctx.options[0]
        pairs = _pairs(ctx.options, (hidden, weight), (ref_hidden, ref_weight))
        for (rows, cols, logits), (_, _, ref_logits) in pairs:
            logits -= log_z[rows, None]
            ref_logits -= ref_log_z[rows, None]
            # d KL = p (log p - log q - KL)
            factor = (logits - ref_logits).sub_(kl[rows, None]).mul_(scale[rows, None])
            grad = logits.exp_().mul_(factor)
            gradients.add(rows, cols, grad)
        return gradients.outputs()


def chunked_draft_kl(
    draft_hidden: Tensor,
    hidden: Tensor,
    weight: Tensor,
    temperature: float,
    chunk_tokens: int,
    shard: VocabularyShard,
) -> Tensor:
    """Collective over tensor-parallel ranks. Returns KL(policy || draft) of every position, float32
    [T], in nats.

    Both are softmax(hidden weight^T / temperature). Only draft_hidden has a gradient, this rank's
    PARTIAL sum. It is also the gradient of the cross-entropy, which is the KL plus the policy's
    entropy. Other arguments as for chunked_logprobs.
    """
    options = (temperature, chunk_tokens, shard.columns(weight))
    return _DraftKl.apply(hidden, weight, draft_hidden, weight, options, shard.reduce)


class _DraftKl(torch.autograd.Function):
    forward = staticmethod(_FullKl.forward)

    @staticmethod
    def backward(ctx, grad_kl):
        hidden, weight, draft_hidden, _, log_z, draft_log_z, _ = ctx.saved_tensors
        gradients = _Gradients(ctx, draft_hidden, weight)
        scale = grad_kl / ctx.options[0]
        pairs = _pairs(ctx.options, (hidden, weight), (draft_hidden, weight))
        for (rows, cols, logits), (_, _, draft_logits) in pairs:
            draft_logits.sub_(draft_log_z[rows, None]).exp_()
            draft_logits -= logits.sub_(log_z[rows, None]).exp_()  # d KL = q - p
            gradients.add(rows, cols, draft_logits.mul_(scale[rows, None]))
        return None, None, gradients.outputs()[0], None, None, None


def _tiles(
    hidden: Tensor, weight: Tensor, temperature: float, chunk_tokens: int, columns: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields (rows, columns, float32 logits [rows, columns]) of every tile; the next one overwrites
    the logits."""
    buffer = None
    for start in range(0, len(hidden), chunk_tokens):
        rows = slice(start, min(start + chunk_tokens, len(hidden)))
        for first in range(0, columns, TILE_COLUMNS):
            cols = slice(first, min(first + TILE_COLUMNS, columns))
            shape = (rows.stop - rows.start, cols.stop - cols.start)
            if buffer is None:
                buffer = torch.empty(shape[0] * shape[1], dtype=torch.float32, device=hidden.device)
            logits = buffer[: shape[0] * shape[1]].view(shape)
            _matmul(hidden[rows], weight[cols].t(), logits)
            if temperature != 1.0:
                # divided, not multiplied by 1/temperature, as the engine does it
                logits.div_(temperature)
            yield rows, cols, logits


def _add_tile(top: Tensor, mass: Tensor, logits: Tensor) -> Tensor:
    """Adds a tile to the softmax sums [t] of those before, in place, and makes its logits
    e^(l - top). Returns the factor of other sums relative to the maximum before."""
    new_top = torch.maximum(top, logits.amax(1))
    earlier = (top - new_top).exp()
    logits.sub_(new_top[:, None]).exp_()
    mass.mul_(earlier).add_(logits.sum(1))
    top.copy_(new_top)
    return earlier


def _pairs(options: tuple, *models: tuple[Tensor, Tensor]) -> Iterator[tuple]:
    """Yields the same tile of each model, as _tiles; models: hidden states and output weights."""
    return zip(*(_tiles(*model, *options) for model in models), strict=True)


def _matmul(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Multiplies [m, k] by [k, n] into float32 [m, n], because rounding logits to bfloat16 moves
    log-probabilities by 1e-2."""
    if left.dtype == right.dtype == torch.float32:
        torch.mm(left, right, out=out)
    elif left.is_cuda and left.dtype == right.dtype:
        torch.mm(left, right, out_dtype=torch.float32, out=out)
    else:
        torch.mm(left.float(), right.float(), out=out)


def _accumulate(total: Tensor, grad: Tensor, other: Tensor) -> None:
    """Adds grad [m, k] @ other [k, n] to total [m, n] in float32; float32 inputs need no temporary
    of its size."""
    if other.is_cuda and other.dtype != torch.float32:
        total += torch.mm(grad.to(other.dtype), other, out_dtype=torch.float32)
    else:
        total.addmm_(grad, other.float())


def _targets_in(local_targets: Tensor, cols: slice) -> tuple[Tensor, Tensor]:
    """Returns which targets [t, k] lie in these columns, bool, and their indices there (0 for the
    others)."""
    inside = (local_targets >= cols.start) & (local_targets < cols.stop)
    return inside, (local_targets - cols.start).masked_fill(~inside, 0)
