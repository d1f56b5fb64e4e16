"""Records the logits of positions that are trained on, which the actor never holds as a whole."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megagrpo.actor import head, step
from tests.dist.workers.samples import VOCAB


@contextmanager
def recorded_logits() -> Iterator[list[tuple]]:
    """Inside, every call of token_values leaves (rows, columns, logits [T, vocabulary]) of its positions."""
    seen, places, over_tokens, token_values = [], None, step.over_tokens, head.token_values

    def noting_places(*args):
        from_hidden = over_tokens(*args)

        def noting(micro, chunk, hidden):
            nonlocal places
            places = micro.targets
            return from_hidden(micro, chunk, hidden)

        return noting

    def noting_values(actor, chunk, hidden, tokens, temperature):
        local = hidden @ chunk.output_weight().T
        shards = [torch.empty_like(local) for _ in range(actor.config.parallel.tp)]
        dist.all_gather(shards, local.contiguous(), group=mpu.get_tensor_model_parallel_group())
        found = places.rows, places.columns, torch.cat(shards, 1)[:, :VOCAB]
        seen.append(tuple(part.cpu() for part in found))
        return token_values(actor, chunk, hidden, tokens, temperature)

    step.over_tokens, head.token_values = noting_places, noting_values
    try:
        yield seen
    finally:
        step.over_tokens, head.token_values = over_tokens, token_values
