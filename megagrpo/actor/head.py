"""The head: log-probability, entropy and exact KL to the reference of sampled tokens, from hidden
states."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.algo.logprob import (
    VocabularyShard,
    chunked_draft_kl,
    chunked_full_kl,
    chunked_logprobs,
)
from megagrpo.models.body import Body
from megagrpo.models.kinds.draft.layer import gather_context
from megagrpo.models.layers.context import context_group
from megagrpo.types import Batch, MicroBatch, on_device

_TP_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
Loss = tuple[Tensor, dict[str, Tensor]]  # scalar, metric sums


@dataclass(frozen=True)
class Candidates:
    """Holds the log-probabilities of k tokens at each of R targets: [R, k], the model's with a
    gradient."""

    logprobs: Tensor
    teacher: Tensor
    spread: Callable[[Tensor], Tensor]  # values of the targets [R] -> of the trained tokens [t]


@dataclass(frozen=True)
class TokenValues:
    """Holds the model's values of a micro-batch's trained tokens: [t] each, with gradients."""

    logprobs: Tensor
    entropy: Tensor
    squares: Callable[[], Tensor]  # computes the sums of the vocabulary's squared probabilities
    full_kl: Tensor | None  # where batch.reference is there
    candidates: Candidates | None = None  # where they are asked for, and batch.streams has them


# Computes the loss of one micro-batch from the values of its sampled tokens.
LossOfTokens = Callable[[MicroBatch, TokenValues], Loss]
# Computes the loss of one micro-batch from its hidden states [s / tp, b, h], on the last pipeline
# stage.
LastStage = Callable[[MicroBatch, Body, Tensor], Loss]


def over_tokens(
    actor: MegatronActor,
    batch: Batch,
    temperature: float,
    token_loss: LossOfTokens,
    with_candidates: bool = False,
) -> LastStage:
    """Returns what turns hidden states into the values of targets and gives them to `token_loss`.

    with_candidates: those of the tokens that distillation compares, too.
    """

    def from_hidden(micro: MicroBatch, chunk: Body, hidden: Tensor) -> Loss:
        flat = micro.targets.flat
        tokens = micro.at_targets(batch.tokens).long()[:, None]
        streams = batch.streams if with_candidates else None
        if streams is not None and streams.top_ids is not None:
            tokens = torch.cat((tokens, micro.at_targets(streams.top_ids).long()), dim=1)
        at_targets = gathered(actor, hidden)[flat]
        logprobs, entropy = token_values(actor, chunk, at_targets, tokens, temperature)

        def spread(by_token: Tensor) -> Tensor:
            empty = by_token.new_zeros(len(micro.trained))
            values = empty.index_put((micro.target_order,), by_token)
            return _all_context_ranks(values, micro.context)

        def squares() -> Tensor:
            # sum e^2l / (sum e^l)^2, by log p of the same token at half the temperature
            of_half, _ = token_values(actor, chunk, at_targets, tokens[:, 0], temperature / 2)
            return spread((2 * logprobs[:, 0] - of_half).exp())

        full_kl = None
        if (reference := batch.reference) is not None:
            index = reference.index[micro.target_places]
            assert bool((index >= 0).all()), (
                "the reference did not see a position on the rank that trains on it"
            )
            assert reference.output_weight is not None, (
                "the last stage has the reference's output weight"
            )
            weight = chunk.output_weight()
            theirs = on_device(reference.hidden[index], flat.device)
            options = _head_options(actor, weight, temperature)
            full_kl = spread(
                chunked_full_kl(at_targets, weight, theirs, reference.output_weight, *options)
            )
        candidates = None
        if streams is not None and streams.top_logprobs is not None:
            teacher = micro.at_targets(streams.top_logprobs)
            candidates = Candidates(logprobs[:, 1:], teacher, spread)
        sampled = spread(logprobs[:, 0]), spread(entropy), squares
        return token_loss(micro, TokenValues(*sampled, full_kl, candidates))

    return from_hidden


def with_draft(
    actor: MegatronActor, model_loss: LastStage, temperature: float, num_tokens: Tensor | int
) -> LastStage:
    """Returns `model_loss` with the draft's loss added where the draft ran: its mean KL over the
    update's tokens."""

    def from_hidden(micro: MicroBatch, chunk: Body, hidden: Tensor) -> Loss:
        loss, sums = model_loss(micro, chunk, hidden)
        drafted = chunk.take_drafted()
        if drafted is None:
            return loss, sums
        proposed, follows = drafted
        flat = micro.targets.flat
        weight = chunk.output_weight().detach()
        options = _head_options(actor, weight, temperature)
        with torch.no_grad():
            every = gather_context(gathered(actor, hidden.detach()), micro.context)
            next_hidden = every[follows.places[flat]]
        kl = chunked_draft_kl(gathered(actor, proposed)[flat], next_hidden, weight, *options)
        own = (kl * follows.sampled[flat]).sum() / num_tokens
        draft_loss = _all_context_ranks(own, micro.context)
        return loss + draft_loss, {**sums, "draft/kl": draft_loss.detach()}

    return from_hidden


def token_values(
    actor: MegatronActor, chunk: Body, hidden: Tensor, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of `tokens` [T] or [T, k], and entropy [T], from the hidden states
    [T, h] that predict them, the same on every tensor-parallel rank."""
    weight = chunk.output_weight()
    return chunked_logprobs(hidden, weight, tokens, *_head_options(actor, weight, temperature))


def gathered(actor: MegatronActor, hidden: Tensor) -> Tensor:
    """Returns hidden states [s / tp, b, h] as [b s, h] on every tensor-parallel rank."""
    if actor.config.parallel.tp > 1:
        # the gradient of this gather is a reduce-scatter: it sums the vocabulary shards' partial
        # gradients
        hidden = gather_from_sequence_parallel_region(hidden)
    return hidden.transpose(0, 1).flatten(0, 1)


def _head_options(
    actor: MegatronActor, weight: Tensor, temperature: float
) -> tuple[float, int, VocabularyShard]:
    """Returns the last arguments of `chunked_logprobs`; weight: [padded vocab / tp, h]."""
    group = mpu.get_tensor_model_parallel_group()

    def all_reduce(tensor: Tensor, op: str) -> Tensor:
        dist.all_reduce(tensor, op=_TP_OPS[op], group=group)
        return tensor

    shard = VocabularyShard(
        start=mpu.get_tensor_model_parallel_rank() * weight.shape[0],
        size=actor.arch.vocab_size,
        reduce=all_reduce if actor.config.parallel.tp > 1 else None,
    )
    return temperature, actor.config.logprob_chunk_tokens, shard


def _all_context_ranks(values: Tensor, size: int) -> Tensor:
    """Collective over the `size` ranks that share sequences with this one. Returns the values of all
    of them; only this rank's carry a gradient.

    Megatron sums gradients over all context-parallel ranks.
    """
    if size == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total, group=context_group(size))
    return values + (total - values.detach())
