"""Adds embeddings of n-grams to residual streams (SGLang's models/qwen4_exp.py, Qwen4ExpPLELayer).

A token's n-grams, which no sequence and no end token interrupts, choose rows of a table in a file on
the host. Projections of the rows are a value, and a key for each stream; the stream's gate is a
function of the product of both, and the gated value enters it, with a short convolution of the gated
values before.

The value of a token is the same on every rank, so ranks that share a sequence send each other the
gates alone, a number a stream, and each computes the values of all its tokens.
"""

import math
from collections.abc import Sequence

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from megagrpo.models.kinds.gated_residual.layer import normed
from megagrpo.models.kinds.grouped_query.layer import PackedSequences, padded_sequences
from megagrpo.models.kinds.hyper_connections.layer import StreamLayer
from megagrpo.models.kinds.ngrams.describe import NGrams
from megagrpo.models.kinds.recurrent import again
from megagrpo.models.layers.whole_linear import whole_parameter
from megagrpo.models.tensors import HfTensors

_LEAST = 1e-6  # of a product's root


class NGramRows(torch.nn.Module):
    """Computes what is added to the streams of a layer; held whole by every rank."""

    def __init__(self, config: TransformerConfig, own: NGrams, index: int, streams: int):
        super().__init__()
        self._config = config
        self._own = own
        self._index = index
        self._streams = streams
        self._table: Sequence[Tensor] = ()  # in files, see `map_table`
        for name, shape in own.shapes(config.hidden_size, streams).items():
            parameter = whole_parameter(config, shape, config.params_dtype)
            self.register_parameter(name.replace(".", "/"), parameter)

    def map_table(self, hf: HfTensors) -> None:
        """Lets rows be read from a folder's files, of which the mapping's tensors are memory maps.
        Raises ValueError, naming the tensor, if files have other hashes than config.json, or a scale."""
        self._table = [hf[spec.name] for spec in self._own.table(self._index)]
        for name, numbers in self._own.hashing(self._index).items():
            if name in hf and hf[name].tolist() != numbers:
                raise ValueError(
                    f"{name}: {hf[name].tolist()} in the files, but trainers compute with "
                    f"{numbers}, by config.json's seed, vocab_size and ngram_vocab_size_base"
                )

    def forward(self, streams: Tensor, tokens: Tensor, packed: PackedSequences | None) -> Tensor:
        """Maps streams [s / tp, b, n, h], and tokens [b, s] of this context rank, to what is added to
        the streams."""
        batch, count = tokens.shape
        packed = packed or padded_sequences(batch, count, tokens.device)
        borders = packed.cu_seqlens_q.long()
        # of each token in the whole sequences, their first one
        start = borders[:-1].repeat_interleave(borders.diff(), output_size=sum(packed.lengths))
        rows = self._rows(self._numbers(packed.whole(tokens.flatten()), start))
        own = self._own_places(packed, batch, count)
        key = F.linear(rows[own], self._weight("key_proj"))
        gates = again(self._gates, key, streams)
        gates = gather_from_sequence_parallel_region(gates)
        gates = packed.whole(gates.transpose(0, 1).flatten(0, 1))
        values = F.linear(rows, self._weight("value_proj"))
        return again(self._added, gates, values, own, start[own])

    def _weight(self, name: str) -> Tensor:
        return self.get_parameter(f"{name}/weight")

    def _own_places(self, packed: PackedSequences, batch: int, count: int) -> Tensor:
        """Returns where this rank's tokens [s / tp, b] lie in the whole sequences."""
        grids = packed.grids(batch * count)
        places = packed.cu_seqlens_q[grids.query_at[0]] + grids.position
        parts = places.view(batch, count).T.chunk(self._config.tensor_model_parallel_size)
        return parts[mpu.get_tensor_model_parallel_rank()]

    def _numbers(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Returns the rows [T, hashes] of the table for tokens [T] of whole sequences."""
        own = self._own
        places = torch.arange(len(tokens), device=tokens.device)
        sizes = torch.tensor(own.sizes(self._index), device=tokens.device)
        first = sizes.cumsum(0) - sizes
        multipliers = own.multipliers(self._index)
        last = tokens.long()
        found = []
        mixed = last * multipliers[0]
        for back, multiplier in enumerate(multipliers[1:], 1):
            ended = places - back < start
            if back > 1:
                ended |= last == own.end
            last = tokens[(places - back).clamp(min=0)].long().masked_fill(ended, own.end)
            mixed = mixed ^ last * multiplier
            heads = slice((back - 1) * own.heads, back * own.heads)
            found.append(mixed[:, None] % sizes[heads] + first[heads])
        return torch.cat(found, 1)

    @torch.no_grad()
    def _rows(self, numbers: Tensor) -> Tensor:
        """Returns the rows [T, width] of these numbers [T, hashes]."""
        flat = numbers.flatten().cpu()
        size, width = self._table[0].shape
        rows = self._table[0].new_empty(len(flat), width)
        counts = (flat // size).bincount(minlength=len(self._table))
        for part, chosen in zip(self._table, flat.argsort().split(counts.tolist()), strict=True):
            rows[chosen] = part[flat[chosen] % size]
        return rows.view(len(numbers), -1).to(numbers.device, self._config.params_dtype)

    def _normed(self, streams: Tensor, name: str) -> Tensor:
        return normed(streams, self._weight(name), self._config.layernorm_epsilon)

    def _gates(self, key: Tensor, streams: Tensor) -> Tensor:
        """Returns the streams' gates [s / tp, b, n]."""
        key = self._normed(key.view_as(streams), "norm_key")
        product = (key * self._normed(streams, "norm_query")).float().sum(-1)
        product = product / math.sqrt(streams.shape[-1])
        return (product.abs().clamp(min=_LEAST).sqrt() * product.sign()).sigmoid()

    def _added(self, gates: Tensor, values: Tensor, own: Tensor, start: Tensor) -> Tensor:
        """Returns what is added at places `own` [s / tp, b], from gates [T, n] and values [T, h]."""
        weight = self._weight("conv1d").view(self._streams, -1, self._own.kernel)
        taps = []
        for tap in range(self._own.kernel):
            places = own - (self._own.kernel - 1 - tap) * self._own.longest
            at = places.clamp(min=0)
            gated = gates[at][..., None].to(values.dtype) * values[at][:, :, None]
            inside = (places >= start)[..., None, None]
            taps.append(weight[..., tap] * self._normed(gated, "norm_conv") * inside)
        return gated + F.silu(torch.stack(taps).sum(0))  # the last tap is the token itself


class NGramLayer(StreamLayer):
    """Adds embeddings of n-grams to the streams first."""

    def __init__(self, config: TransformerConfig, *args, ngrams: NGrams, **options):
        super().__init__(config, *args, **options)
        self.ple = NGramRows(config, ngrams, self.layer_number - 1, self.streams)

    def forward(self, hidden_states: Tensor, **given) -> tuple[Tensor, None]:
        """As StreamLayer's."""
        streams = hidden_states.unflatten(1, (-1, self.streams))
        added = self.ple(streams, given["attention_bias"], given.get("packed_seq_params"))
        return super().forward((streams + added).flatten(1, 2), **given)
