"""Low-rank adapters on Megatron's linear layers: y = W x + alpha / rank * B (A x); only A and B are
trained.

Each Hugging Face projection has its own A and B, as in PEFT, even if Megatron fuses projections
into one layer. Dense layers: the half that tensor parallelism shards is sharded likewise (B's rows
of a column-parallel layer, A's columns of a row-parallel one), the other is replicated and its
gradient summed; ranks exchange only A x, with `rank` columns. Experts: like their weights; partial
sums go to Megatron's token dispatcher.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import sqrt
from typing import TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn import Module, Parameter, ParameterDict

from megagrpo.config.actor import LoraConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.body import Body
from megagrpo.models.tensors import RankPlace, layer_prefix

_CHILD = "adapters"  # what a linear layer calls its Adapters


Linear: TypeAlias = ColumnParallelLinear | RowParallelLinear
# One of Megatron's layers, the prefix of its projections' HF names, and the rows [n] int64 of this
# rank's weight that belong to each projection.
_Site: TypeAlias = tuple[Linear, str, dict[str, Tensor]]


class Adapters(Module):
    """Holds A [rank, inputs] and B [outputs, rank] of the targets in one linear layer, as this rank
    has them."""

    # [n] int64: which outputs the Bs' rows are, one after the other; None: all, in order
    rows: Tensor | None

    def __init__(self, site: _Site, lora: LoraConfig, place: RankPlace, dtype: torch.dtype):
        super().__init__()
        linear, self.prefix, rows_by_projection = site
        names = [name for name in rows_by_projection if name in lora.targets]
        self.row_parallel = isinstance(linear, RowParallelLinear)
        self.is_expert = linear.is_expert
        self.shard = place.expert if self.is_expert else place.tensor
        self.scale = lora.scale
        self.enabled = True
        inputs = linear.weight.shape[1]
        self.a, self.b = ParameterDict(), ParameterDict()
        for name in names:  # one by one: given a dictionary it would sort them
            self.a[name] = Parameter(torch.empty(lora.rank, inputs, dtype=dtype))
            self.b[name] = Parameter(
                torch.empty(len(rows_by_projection[name]), lora.rank, dtype=dtype)
            )
        rows = torch.cat([rows_by_projection[name] for name in names])
        in_order = torch.equal(rows, _rows(linear))
        self.register_buffer("rows", None if in_order else rows, persistent=False)
        cut, whole, dim = (self.a, self.b, 1) if self.row_parallel else (self.b, self.a, 0)
        self._mark(cut, whole, dim, place)

    def _mark(self, cut: ParameterDict, whole: ParameterDict, dim: int, place: RankPlace) -> None:
        """Tells Megatron which parameters are shards, for the gradient norm, and over which ranks
        gradients add up."""
        for parameter in cut.values():
            set_tensor_model_parallel_attributes(parameter, True, dim, 1)
        for parameter in whole.values():
            if self.is_expert:
                # an expert's copy counts once in its expert-parallel group, whatever
                # tensor-parallel rank has it
                parameter.tensor_model_parallel = place.expert.rank == 0
            else:
                parameter.sequence_parallel = place.tensor.size > 1
        if self.is_expert:
            for parameter in (*cut.values(), *whole.values()):
                parameter.allreduce = False

    def forward(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Returns the linear layer's output [..., outputs] of inputs [..., inputs] with what the
        adapters add."""
        low = torch.nn.functional.linear(inputs, torch.cat([*self.a.values()]))
        if not self.is_expert and self.shard.size > 1:
            # inputs of a column-parallel layer are this rank's part of the sequence, outputs of a
            # row-parallel one too
            low = (
                reduce_scatter_to_sequence_parallel_region(low)
                if self.row_parallel
                else gather_from_sequence_parallel_region(low)
            )
        parts = low.split(low.shape[-1] // len(self.b), -1)
        added = [
            torch.nn.functional.linear(part, b)
            for part, b in zip(parts, self.b.values(), strict=True)
        ]
        product = torch.cat(added, -1) * self.scale
        return output + product if self.rows is None else output.index_add(-1, self.rows, product)

    def merge_into(self, weight: Tensor) -> None:
        """Adds alpha / rank * B A to this rank's weight [outputs, inputs], in float32, rounded
        once."""
        halves = zip(self.a.values(), self.b.values(), strict=True)
        added = torch.cat([b.float() @ a.float() for a, b in halves]) * self.scale
        rows = slice(None) if self.rows is None else self.rows
        merged = weight.float()
        merged[rows] += added
        weight.copy_(merged)

    def hf_names(self) -> Iterator[tuple[str, str, Parameter, int | None]]:
        """Yields HF name, own name, parameter, and the dimension cut over tensor-parallel ranks,
        None where whole."""
        halves = (
            ("A", self.a, 1 if self.row_parallel else None),
            ("B", self.b, None if self.row_parallel else 0),
        )
        for letter, own, cut in halves:
            for name, parameter in own.items():
                hf = f"{self.prefix}{name}.lora_{letter}.weight"
                yield hf, f"{letter.lower()}.{name}", parameter, cut


def add_adapters(
    chunk: Body, arch: Architecture, lora: LoraConfig, place: RankPlace, dtype: torch.dtype
) -> None:
    """Freezes a chunk and gives adapters, uninitialized, to those of its layers that hold a
    target."""
    chunk.requires_grad_(False)
    for linear, prefix, rows in _sites(chunk, arch):
        if rows.keys() & set(lora.targets):
            linear.add_module(_CHILD, Adapters((linear, prefix, rows), lora, place, dtype))
            linear.register_forward_hook(_add_to_output)
    if chunk.pre_process:
        # Recomputation gives gradients only where an input wants one, and frozen embeddings do not.
        chunk.embedding.register_forward_hook(_want_gradient)


def _add_to_output(linear: Module, inputs: tuple, output: tuple[Tensor, Tensor | None]):
    adapters = getattr(linear, _CHILD)
    return (adapters(inputs[0], output[0]), output[1]) if adapters.enabled else None


def _want_gradient(module: Module, inputs: tuple, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _sites(chunk: Body, arch: Architecture) -> Iterator[_Site]:
    queries = arch.attention.heads // arch.attention.kv_heads
    dim = arch.attention.head_dim
    for layer in chunk.decoder.layers:
        prefix = layer_prefix(layer.layer_number - 1)
        attention = layer.self_attention
        # as models/tensors.py fills it
        heads = _rows(attention.linear_qkv).view(-1, queries + 2, dim)
        qkv = {
            "q_proj": heads[:, :queries].flatten(),
            "k_proj": heads[:, queries].flatten(),
            "v_proj": heads[:, queries + 1].flatten(),
        }
        yield attention.linear_qkv, prefix + "self_attn.", qkv
        yield attention.linear_proj, prefix + "self_attn.", {"o_proj": _rows(attention.linear_proj)}
        mlps = {"mlp.": layer.mlp}
        if arch.is_moe:
            experts = zip(
                layer.mlp.local_expert_indices, layer.mlp.experts.local_experts, strict=True
            )
            mlps = {f"mlp.experts.{index}.": expert for index, expert in experts}
        for name, mlp in mlps.items():
            gate, up = _rows(mlp.linear_fc1).chunk(2)
            yield mlp.linear_fc1, prefix + name, {"gate_proj": gate, "up_proj": up}
            yield mlp.linear_fc2, prefix + name, {"down_proj": _rows(mlp.linear_fc2)}


def _rows(linear: Linear) -> Tensor:
    return torch.arange(len(linear.weight), device="cpu")


def all_adapters(chunks: list[Body]) -> list[Adapters]:
    """Returns the adapters of this rank's layers."""
    return [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapters)
    ]


def is_adapter(parameter_name: str) -> bool:
    """Tells by a parameter's name in its chunk whether it is one of an adapter."""
    return f".{_CHILD}." in parameter_name


def load_adapters(chunks: list[Body], hf: Mapping[str, Tensor]) -> None:
    """Copies this rank's slices of whole A and B, by HF names, into the adapters: only slices and
    copies."""
    with torch.no_grad():
        for adapters in all_adapters(chunks):
            for name, _, parameter, cut in adapters.hf_names():
                whole = hf[name]
                parameter.copy_(whole if cut is None else adapters.shard.part(whole, cut))


class InitialAdapters(Mapping[str, Tensor]):
    """Draws adapters as PEFT does: A uniform in +-1 / sqrt(inputs), B 0. The same whole tensors for
    every layout."""

    def __init__(self, specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], seed: int):
        self._specs = specs
        self._seed = seed

    def __getitem__(self, name: str) -> Tensor:
        shape, _ = self._specs[name]
        if name.endswith("lora_B.weight"):
            return torch.zeros(shape, device="cpu")
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8]) >> 1)
        return (2 * torch.rand(shape, generator=generator, device="cpu") - 1) / sqrt(shape[1])

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


@contextmanager
def merged(chunks: list[Body]) -> Iterator[None]:
    """Lets the weights be W + alpha / rank * B A inside, the adapters off; W comes back bit for bit
    whatever happens.

    In place: who publishes or exports reads live parameters. Costs a copy of the targeted weights
    meanwhile.
    """
    linears = [m for chunk in chunks for m in chunk.modules() if hasattr(m, _CHILD)]
    kept = [linear.weight.detach().clone() for linear in linears]
    try:
        with torch.no_grad():
            for linear in linears:
                getattr(linear, _CHILD).merge_into(linear.weight)
        with adapters_off(chunks):
            yield
    finally:
        with torch.no_grad():
            for linear, weight in zip(linears, kept, strict=True):
                linear.weight.copy_(weight)


@contextmanager
def adapters_off(chunks: list[Body]) -> Iterator[None]:
    """Lets the model compute without its adapters inside."""
    every = all_adapters(chunks)
    try:
        for adapters in every:
            adapters.enabled = False
        yield
    finally:
        for adapters in every:
            adapters.enabled = True


def sum_expert_replicas(chunks: list[Body]) -> None:
    """Collective over expert-tensor-parallel ranks. Sums the gradients of their replicated
    parameters.

    Megatron sums only those of dense layers. Call it before the sum over data-parallel ranks, after
    which a distributed optimizer has only its shard.
    """
    if mpu.get_expert_tensor_parallel_world_size() == 1:
        return
    expert_adapters = [adapters for adapters in all_adapters(chunks) if adapters.is_expert]
    # the half that every tensor-parallel rank holds whole
    replicas = [
        p
        for adapters in expert_adapters
        for p in (adapters.b if adapters.row_parallel else adapters.a).values()
    ]
    if not replicas:
        return
    gradients = [replica.main_grad for replica in replicas]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=mpu.get_expert_tensor_parallel_group())
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def sharded_adapters(chunk: Body) -> dict[str, ShardedTensor]:
    """Returns the parameters of a chunk that a checkpoint holds, by their names in it; frozen ones
    are the HF model's.

    Keys are HF names, so that any layout finds its slices.
    """
    sharded = {}
    dense_copies = mpu.get_data_parallel_rank(with_context_parallel=True)
    for path, adapters in chunk.named_modules():
        if not isinstance(adapters, Adapters):
            continue
        copies = mpu.get_expert_data_parallel_rank() if adapters.is_expert else dense_copies
        for hf, own, parameter, cut in adapters.hf_names():
            shard = adapters.shard
            sharded[f"{path}.{own}"] = ShardedTensor.from_rank_offsets(
                hf,
                parameter,
                *([] if cut is None else [(cut, shard.rank, shard.size)]),
                replica_id=(0, shard.rank if cut is None else 0, copies),
            )
    return sharded
