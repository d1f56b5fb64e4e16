"""Gathers whole Hugging Face tensors on rank 0: the plan, and the collective that executes it.

Exactly one trainer rank contributes each element of every HF tensor, found by inverting the recorded copies.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.mesh import Mesh
from megagrpo.weights.copies.record import Copy, Specs
from megagrpo.weights.copies.views import Box
from megagrpo.weights.transports.reshard_plan import trainer_atoms
from megagrpo.weights.wire.moving import Traffic


@dataclass(frozen=True)
class Bucket:
    """Names whole HF tensors that travel together, and by rank the slices that it contributes, in packed order."""

    names: tuple[str, ...]
    dtype: torch.dtype  # of all of them, as they are published
    parts: dict[int, tuple[Copy, ...]]


@dataclass(frozen=True)
class GatherPlan:
    """All buckets of a model, in the order in which they travel; the same on every rank."""

    specs: Specs  # of the HF tensors: name -> shape and published dtype
    buckets: tuple[Bucket, ...]


def published_specs(specs: Specs, dtype: torch.dtype, kept: Mapping[str, torch.dtype] | None = None) -> Specs:
    """Returns the specs with published dtypes: that in `kept`, else `dtype`."""
    kept = kept or {}
    return {name: (shape, kept.get(name, dtype)) for name, (shape, _) in specs.items()}


def share_out(everyone: list[list[Copy]], specs: Specs, on_main: bool) -> dict[str, list[tuple[int, Copy]]]:
    """Cuts every HF tensor into disjoint slices, each with the one rank that contributes it. The same result on all
    ranks.

    `everyone`: copies by rank. A replicated slice goes to rank 0 if that holds it (only with `on_main`: rank 0 sends
    nothing), else to the rank with the least work so far, the lowest on ties. Raises ValueError for an HF tensor with
    elements that no rank holds.
    """
    load = [0] * len(everyone)
    shares: dict[str, list[tuple[int, Copy]]] = {}
    for name, atoms in trainer_atoms(everyone, specs).items():
        shares[name] = []
        for atom in atoms:
            rank = 0 if on_main and 0 in atom.ranks else min(atom.ranks, key=lambda r: (load[r], r))
            load[rank] += atom.copy.box.numel
            shares[name].append((rank, atom.copy))
    return shares


def make_gather_plan(
    everyone: list[list[Copy]], specs: Specs, bucket_bytes: int, together: Iterable[tuple[str, ...]] = ()
) -> GatherPlan:
    """Fills buckets of at most `bucket_bytes` with HF tensors in checkpoint order; a larger one has its own.

    specs: with published dtypes, of which a bucket has one. together: names of tensors that must share a bucket. Raises
    ValueError if these have several dtypes.
    """
    shares = share_out(everyone, specs, on_main=True)
    buckets = []
    for dtype, units in _units(specs, together).items():
        for names in _filled(units, specs, bucket_bytes):
            parts: dict[int, list[Copy]] = {}
            for name in names:
                for rank, copy in shares[name]:
                    parts.setdefault(rank, []).append(copy)
            buckets.append(Bucket(names, dtype, {rank: tuple(copies) for rank, copies in parts.items()}))
    return GatherPlan(specs, tuple(buckets))


def _units(specs: Specs, together: Iterable[tuple[str, ...]]) -> dict[torch.dtype, list[list[str]]]:
    """Returns by dtype the groups of tensors that share a bucket, most of one tensor, in the order of their first."""
    unit_of, place = {name: [name] for name in specs}, {name: number for number, name in enumerate(specs)}
    for group in together:
        joined = list({id(unit_of[name]): unit_of[name] for name in group}.values())
        names = sorted((name for unit in joined for name in unit), key=place.__getitem__)
        if len({specs[name][1] for name in names}) > 1:
            raise ValueError(f"an engine wants {', '.join(names)} together, which are published in several dtypes")
        unit_of |= dict.fromkeys(names, names)
    units: dict[torch.dtype, list[list[str]]] = {}
    for name, unit in unit_of.items():
        if unit[0] == name:
            units.setdefault(specs[name][1], []).append(unit)
    return units


def _filled(units: list[list[str]], specs: Specs, bucket_bytes: int) -> list[tuple[str, ...]]:
    """Returns the names of each bucket."""
    groups: list[list[str]] = [[]]
    size = 0
    for names in units:
        unit_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in map(specs.__getitem__, names))
        if groups[-1] and size + unit_bytes > bucket_bytes:
            groups.append([])
            size = 0
        groups[-1] += names
        size += unit_bytes
    return [tuple(names) for names in groups]


def gather_to_main(
    plan: GatherPlan,
    parameters: Mapping[str, Tensor],
    mesh: Mesh,
    use: Callable[[Iterator[dict[str, Tensor]]], object],
    what: str,
) -> None:
    """Collective. Runs `use` on rank 0, over the buckets that all ranks contribute to (see gather_buckets).

    If `use` fails, LeaderError is raised on every rank; `what` describes the work in its message.
    """
    buckets = gather_buckets(plan, parameters, mesh)

    def use_all() -> None:
        with ExitStack() as stack:
            stack.callback(_exhaust, buckets)  # if `use` fails, the other ranks are still sending
            use(buckets)

    if not mesh.is_main:
        _exhaust(buckets)
    mesh.from_main(use_all, what)


def gather_buckets(plan: GatherPlan, parameters: Mapping[str, Tensor], mesh: Mesh) -> Iterator[dict[str, Tensor]]:
    """Collective. Yields the whole HF tensors of one bucket after the other on rank 0, empty dicts on the others.

    Tensors are contiguous, in the published dtype, on the mesh's device; they are views of rank 0's parameters if those
    are such already. Every rank must iterate to the end. The slices of the next bucket travel while the caller works on
    this one: memory has at most four buckets, two whole ones and the slices of two.
    """
    if mesh.rank != 0:
        yield from _contribute(plan, parameters, mesh)
        return
    coming = _receive(plan, 0, mesh)
    for number, bucket in enumerate(plan.buckets):
        (arrived, works), coming = coming, _receive(plan, number + 1, mesh)
        ours = bucket.parts.get(0, ())
        full = {copy.hf: live for copy in ours if _is_whole(live := copy.view(parameters), copy.hf, plan, mesh.device)}
        assembled = [name for name in bucket.names if name not in full]
        full |= {name: torch.empty(plan.specs[name][0], dtype=bucket.dtype, device=mesh.device) for name in assembled}
        for copy in ours:
            if copy.hf in assembled:
                _at(full[copy.hf], copy.box).copy_(copy.view(parameters))
        for work in works:
            _wait(
                work,
                f"rank 0 waits for slices of weights bucket {number + 1} ({bucket.names[0]} ...) "
                f"of ranks {sorted(arrived)}",
            )
        for rank, flat in arrived.items():
            for copy, part in zip(
                bucket.parts[rank], flat.split([c.box.numel for c in bucket.parts[rank]]), strict=True
            ):
                _at(full[copy.hf], copy.box).copy_(part.view(copy.size))
        yield {name: full[name] for name in bucket.names}


def gather_traffic(plan: GatherPlan, parameters: Mapping[str, Tensor], mesh: Mesh) -> Traffic:
    """Returns what this rank sends to rank 0, and stages, when the plan's buckets are gathered."""
    held = [0]  # bytes, for each bucket; those of two at a time
    messages = wire_bytes = 0
    for bucket in plan.buckets:
        item = bucket.dtype.itemsize
        num = {rank: item * sum(copy.box.numel for copy in copies) for rank, copies in bucket.parts.items()}
        if mesh.is_main:
            ours = bucket.parts.get(0, ())
            uncopied = [c.box.numel for c in ours if _is_whole(c.view(parameters), c.hf, plan, mesh.device)]
            held.append(2 * sum(num.values()) - num.get(0, 0) - item * sum(uncopied))  # assembled, of slices that came
        elif mesh.rank in num:
            held.append(num[mesh.rank])
            messages, wire_bytes = messages + 1, wire_bytes + num[mesh.rank]
    return Traffic(wire_bytes, messages, staging_bytes=max((a + b for a, b in pairwise(held)), default=0))


def _exhaust(buckets: Iterator[dict[str, Tensor]]) -> None:
    for _ in buckets:
        pass


def _contribute(plan: GatherPlan, parameters: Mapping[str, Tensor], mesh: Mesh) -> Iterator[dict[str, Tensor]]:
    sent = None
    for number, bucket in enumerate(plan.buckets):
        if mesh.rank in bucket.parts:
            packed = torch.cat(
                [c.view(parameters).to(mesh.device, bucket.dtype).reshape(-1) for c in bucket.parts[mesh.rank]]
            )
            if sent is not None:
                for work in sent[0]:
                    _wait(
                        work,
                        f"rank {mesh.rank} waits for rank 0 to take its slices of a weights bucket before {number + 1}",
                    )
            sent = (dist.batch_isend_irecv([dist.P2POp(dist.isend, packed, 0)]), packed)
        yield {}
    for work in sent[0] if sent is not None else ():
        _wait(work, f"rank {mesh.rank} waits for rank 0 to take its last slices of the weights")


def _receive(plan: GatherPlan, number: int, mesh: Mesh) -> tuple[dict[int, Tensor], list[dist.Work]]:
    """Returns the tensors to be filled, by rank, and the works: one for each rank over gloo, one for all over NCCL."""
    if number == len(plan.buckets):
        return {}, []
    bucket = plan.buckets[number]
    flats = {
        rank: torch.empty(sum(c.box.numel for c in copies), dtype=bucket.dtype, device=mesh.device)
        for rank, copies in sorted(bucket.parts.items())
        if rank != 0
    }
    return flats, dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, flat, rank) for rank, flat in flats.items()]
    ) if flats else []


def _wait(work: dist.Work, who: str) -> None:
    try:
        work.wait()
    except RuntimeError as exc:
        raise RuntimeError(f"{who}: {exc}") from exc


def _is_whole(live: Tensor, name: str, plan: GatherPlan, device: torch.device) -> bool:
    """Returns whether a slice of this rank's parameters is the whole HF tensor as published."""
    shape, dtype = plan.specs[name]
    return live.dtype == dtype and live.device == device and live.is_contiguous() and live.shape == shape


def _at(tensor: Tensor, box: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
