"""Gathers Hugging Face tensors on rank 0: the plan, and the collective that executes it.

Exactly one trainer rank contributes each element of every HF tensor. The plan inverts the recorded
copies.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.mesh import Mesh
from megagrpo.weights.copies.recorder import Copy, Specs
from megagrpo.weights.transports.reshard_plan import trainer_atoms
from megagrpo.weights.wire.engine_group import lost_if_cut
from megagrpo.weights.wire.moving import Traffic

_HELD = 4  # buckets that rank 0 holds at most, see gather_buckets


@dataclass(frozen=True)
class Bucket:
    """HF tensors that travel together, and by rank the slices that it contributes, in packed
    order."""

    names: tuple[str, ...]
    dtype: torch.dtype  # of all of them, as they are published
    parts: dict[int, list[Copy]]


@dataclass(frozen=True)
class GatherPlan:
    """All buckets of a model, in the order in which they travel; the same on every rank."""

    specs: Specs  # of the HF tensors: name -> shape and published dtype
    buckets: list[Bucket]


def published_specs(
    specs: Specs, dtype: torch.dtype, fixed: Mapping[str, torch.dtype] = {}
) -> Specs:
    """Returns the specs with published dtypes: from `fixed`, else `dtype`."""
    return {name: (shape, fixed.get(name, dtype)) for name, (shape, _) in specs.items()}


def gather_copies(copies: list[Copy], mesh: Mesh) -> list[list[Copy]]:
    """Collective. Returns the copies of every rank, by rank; ranks with equal copies share one
    list.

    Of ranks with equal copies (replicas) only the first sends them, and no list is padded to the
    longest one, as a gather does: from 512 ranks both would be gigabytes.
    """
    digests = mesh.gather_world(hashlib.sha256(repr(copies).encode()).digest())
    lists = {
        digest: mesh.from_rank(digests.index(digest), lambda: copies, "describe its parameters")
        for digest in dict.fromkeys(digests)
    }
    return [lists[digest] for digest in digests]


def share_out(
    everyone: list[list[Copy]], specs: Specs, on_main: bool
) -> dict[str, list[tuple[int, Copy]]]:
    """Cuts every HF tensor into disjoint slices, each with the one rank that contributes it, the
    same on all ranks.

    everyone: copies by rank. on_main: rank 0 contributes every slice that it holds, because it sends
    nothing. The rank with the least work so far contributes any other. Raises ValueError for an HF
    tensor with elements that no rank holds.
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
    everyone: list[list[Copy]],
    specs: Specs,
    staging_bytes: int,
    together: Iterable[tuple[str, ...]] = (),
) -> GatherPlan:
    """Fills buckets with HF tensors in checkpoint order.

    staging_bytes: the most that rank 0 stages, unless a tensor is larger than a bucket.
    specs: with published dtypes; a bucket has one. together: names of tensors that must share a
    bucket. Raises ValueError if these have several dtypes.
    """
    shares = share_out(everyone, specs, on_main=True)
    buckets = []
    for dtype, units in _units(specs, together).items():
        for names in _filled(units, specs, staging_bytes // _HELD):
            parts: dict[int, list[Copy]] = {}
            for name in names:
                for rank, copy in shares[name]:
                    parts.setdefault(rank, []).append(copy)
            buckets.append(Bucket(names, dtype, parts))
    return GatherPlan(specs, buckets)


def _units(specs: Specs, together: Iterable[tuple[str, ...]]) -> dict[torch.dtype, list[list[str]]]:
    """Returns by dtype the groups of tensors that share a bucket, in the order of their first
    tensors. Most groups have one tensor."""
    unit_of = {name: [name] for name in specs}
    order = {name: number for number, name in enumerate(specs)}
    for group in together:
        names = sorted({other for name in group for other in unit_of[name]}, key=order.__getitem__)
        if len({specs[name][1] for name in names}) > 1:
            raise ValueError(
                f"an engine loads {', '.join(names)} together, which are published in several dtypes"
            )
        unit_of |= dict.fromkeys(names, names)
    units: dict[torch.dtype, list[list[str]]] = {}
    for name, unit in unit_of.items():
        if unit[0] == name:
            units.setdefault(specs[name][1], []).append(unit)
    return units


def _filled(units: list[list[str]], specs: Specs, bucket_bytes: int) -> list[tuple[str, ...]]:
    """Returns the names of each bucket."""
    buckets: list[list[str]] = [[]]
    size = 0
    for names in units:
        unit_bytes = sum(
            prod(shape) * dtype.itemsize for shape, dtype in map(specs.__getitem__, names)
        )
        if buckets[-1] and size + unit_bytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1] += names
        size += unit_bytes
    return [tuple(names) for names in buckets]


def gather_to_main(
    plan: GatherPlan,
    parameters: Mapping[str, Tensor],
    mesh: Mesh,
    use: Callable[[Iterator[dict[str, Tensor]]], object],
    action: str,
    traffic: Traffic | None = None,
) -> None:
    """Collective. Runs `use` on rank 0 over gather_buckets. If it fails, every rank raises
    LeaderError, which names the action."""
    buckets = gather_buckets(plan, parameters, mesh, traffic)

    def use_all() -> None:
        with ExitStack() as stack:
            # takes the rest if `use` fails, because the other ranks are still sending
            stack.callback(deque, buckets, 0)
            use(buckets)

    if not mesh.is_main:
        deque(buckets, 0)
    mesh.from_main(use_all, action)


def gather_buckets(
    plan: GatherPlan, parameters: Mapping[str, Tensor], mesh: Mesh, traffic: Traffic | None = None
) -> Iterator[dict[str, Tensor]]:
    """Collective. Yields the HF tensors of one bucket after the other on rank 0, empty dicts on the
    others.

    Tensors are contiguous, in the published dtype, on the mesh's device; rank 0's parameters are not
    copied if they are so already. Every rank must iterate to the end. The slices of the next bucket
    travel while the caller uses this one, so memory has at most four buckets: two assembled ones
    and the slices of two. traffic: counts this rank's sent and staged bytes.
    """
    if traffic is None:
        traffic = Traffic()
    if mesh.rank != 0:
        yield from _contribute(plan, parameters, mesh, traffic)
        return
    coming = _receive(plan, 0, mesh)
    held = 0
    for number, bucket in enumerate(plan.buckets, 1):
        arrived, works = coming
        coming = _receive(plan, number, mesh)
        ours = bucket.parts.get(0, [])
        full = {
            copy.hf: live
            for copy in ours
            if _is_whole(live := copy.view(parameters), copy.hf, plan, mesh.device)
        }
        assembled = [name for name in bucket.names if name not in full]
        full |= {
            name: torch.empty(plan.specs[name][0], dtype=bucket.dtype, device=mesh.device)
            for name in assembled
        }
        before = held
        held = sum(
            tensor.nbytes for tensor in (*map(full.__getitem__, assembled), *arrived.values())
        )
        traffic.staging_bytes = max(traffic.staging_bytes, before + held)
        for copy in ours:
            if copy.hf in assembled:
                full[copy.hf][copy.box.slices].copy_(copy.view(parameters))
        slices = f"slices of weights bucket {number} ({bucket.names[0]} ...)"
        _wait(works, f"rank 0 waits for {slices} of ranks {sorted(arrived)}")
        for rank, flat in arrived.items():
            parts = flat.split([copy.box.numel for copy in bucket.parts[rank]])
            for copy, part in zip(bucket.parts[rank], parts, strict=True):
                full[copy.hf][copy.box.slices].copy_(part.view(copy.size))
        yield {name: full[name] for name in bucket.names}


def _contribute(
    plan: GatherPlan, parameters: Mapping[str, Tensor], mesh: Mesh, traffic: Traffic
) -> Iterator[dict[str, Tensor]]:
    works: list[dist.Work] = []
    packed = torch.empty(0)  # referenced until it is sent
    for number, bucket in enumerate(plan.buckets, 1):
        if mesh.rank in bucket.parts:
            parts = [
                c.view(parameters).to(mesh.device, bucket.dtype).reshape(-1)
                for c in bucket.parts[mesh.rank]
            ]
            following = torch.cat(parts)
            traffic.add(
                Traffic(
                    following.nbytes, messages=1, staging_bytes=packed.nbytes + following.nbytes
                )
            )
            _wait(
                works,
                f"rank {mesh.rank} waits for rank 0 to take its "
                f"slices of a weights bucket before {number}",
            )
            packed = following
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, packed, 0)])
        yield {}
    _wait(works, f"rank {mesh.rank} waits for rank 0 to take its last slices of the weights")


def _receive(
    plan: GatherPlan, number: int, mesh: Mesh
) -> tuple[dict[int, Tensor], list[dist.Work]]:
    """Returns the tensors to be filled, by rank, and the works: over gloo one for each rank, over
    NCCL one for all."""
    if number == len(plan.buckets):
        return {}, []
    bucket = plan.buckets[number]
    flats = {
        rank: torch.empty(sum(c.box.numel for c in copies), dtype=bucket.dtype, device=mesh.device)
        for rank, copies in sorted(bucket.parts.items())
        if rank != 0
    }
    receives = [dist.P2POp(dist.irecv, flat, rank) for rank, flat in flats.items()]
    return flats, dist.batch_isend_irecv(receives) if receives else []


def _wait(works: list[dist.Work], problem: str) -> None:
    for work in works:
        with lost_if_cut(problem):
            work.wait()


def _is_whole(live: Tensor, name: str, plan: GatherPlan, device: torch.device) -> bool:
    """Returns whether a slice of this rank's parameters is the complete HF tensor as published."""
    shape, dtype = plan.specs[name]
    return (
        live.dtype == dtype
        and live.device == device
        and live.is_contiguous()
        and live.shape == shape
    )
