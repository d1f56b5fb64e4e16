"""HF -> sharded ranks -> HF is bit-equal: tensor-parallel shards, replicas, fused and padded parameters, stages."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from megagrpo.mesh import LeaderError, Mesh
from megagrpo.weights.copies.recorder import Copy, record_whole
from megagrpo.weights.copies.views import Box
from megagrpo.weights.digests.digest import slice_digest
from megagrpo.weights.expected_digests import ExpectedDigests
from megagrpo.weights.hf_folder import HfFolder, write_hf_folder
from megagrpo.weights.transports.gather_plan import (
    gather_buckets,
    gather_to_main,
    make_gather_plan,
    published_specs,
    share_out,
)
from megagrpo.weights.transports.protocol import TrainerWeights
from megagrpo.weights.wire.engine_group import GroupLimits
from megagrpo.weights.wire.moving import Traffic
from tests.dist.workers.launch import run_meshes

VOCAB, HIDDEN, FFN, LAYERS = 29, 8, 12, 3
SHAPES = {"embed": (VOCAB, HIDDEN), "norm": (HIDDEN,), "head": (VOCAB, HIDDEN)}
for layer in range(LAYERS):
    parts = {"norm": (HIDDEN,), "gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
    parts |= {"q": (4 * 2, HIDDEN), "k": (2 * 2, HIDDEN)}
    SHAPES |= {f"{layer}.{name}": shape for name, shape in parts.items()}
SPECS = {name: (shape, torch.float32) for name, shape in SHAPES.items()}
KEPT = {f"{layer}.norm": torch.float32 for layer in range(LAYERS)}  # where the others are rounded


def hf_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


class ToyActor:
    """tp shards of a fused model; last layer and head live on the last pipeline stage; the rest replicate it."""

    def __init__(self, tp: int, tp_rank: int, pp: int, pp_rank: int, device: torch.device | None = None):
        self.tp, self.tp_rank = tp, tp_rank
        zeros = partial(torch.zeros, device=device)
        self.layers = [layer for layer in range(LAYERS) if layer * pp // LAYERS == pp_rank]
        self.first, self.last = pp_rank == 0, pp_rank == pp - 1
        rows = -(-VOCAB // tp)
        self.live = {"embed": zeros(rows, HIDDEN)} if self.first else {}
        if self.last:
            self.live |= {"norm": zeros(HIDDEN), "head": zeros(rows, HIDDEN)}
        for layer in self.layers:
            shapes = {"norm": (HIDDEN,), "fc1": (2 * FFN // tp, HIDDEN), "fc2": (HIDDEN, FFN // tp)}
            shapes["qk"] = (12 // tp, HIDDEN)
            self.live |= {f"{layer}.{name}": zeros(shape) for name, shape in shapes.items()}

    @classmethod
    def of(cls, mesh: Mesh, tp: int, pp: int) -> "ToyActor":
        return cls(tp, mesh.rank % tp, pp, mesh.rank // tp % pp, mesh.device)

    def load(self, hf) -> None:
        shard = lambda tensor, dim: tensor.chunk(self.tp, dim)[self.tp_rank]  # noqa: E731
        for name in {"embed", "head"} & self.live.keys():
            start = self.tp_rank * len(self.live[name])
            real = hf[name][start : start + len(self.live[name])]
            self.live[name][: len(real)].copy_(real)
            self.live[name][len(real) :].zero_()
        if self.last:
            self.live["norm"].copy_(hf["norm"])
        for layer in self.layers:
            self.live[f"{layer}.norm"].copy_(hf[f"{layer}.norm"])
            fc1 = self.live[f"{layer}.fc1"].view(2, FFN // self.tp, HIDDEN)
            fc1[0].copy_(shard(hf[f"{layer}.gate"], 0))
            fc1[1].copy_(shard(hf[f"{layer}.up"], 0))
            self.live[f"{layer}.fc2"].copy_(shard(hf[f"{layer}.down"], 1))
            groups = self.live[f"{layer}.qk"].view(2 // self.tp, 3, 2, HIDDEN)  # [q, q, k] by key head
            groups[:, :2].copy_(shard(hf[f"{layer}.q"].view(2, 2, 2, HIDDEN), 0))
            groups[:, 2].copy_(shard(hf[f"{layer}.k"].view(2, 2, HIDDEN), 0))


def expected_by_name(expected: ExpectedDigests) -> dict[str, tuple[int, int]]:
    """Digests of every whole tensor and of all but its first row, added later; local parts in a thread of their own."""
    whole = {name: Copy(name, (0,) * len(shape), shape, "", 0, (0,) * len(shape)) for name, shape in SHAPES.items()}
    rest = {
        name: copy.restrict(Box((1, *copy.start[1:]), (copy.size[0] - 1, *copy.size[1:])))
        for name, copy in whole.items()
    }
    numbers = expected.add([list(copies.values()) for copies in (whole, whole)])
    numbers += expected.add([list(rest.values())])
    assert (numbers[0] == numbers[1]).all() and numbers[2].min() == len(SHAPES), "each slice has one number"
    with ThreadPoolExecutor(1) as pool:
        digests = expected.total(pool.submit(expected.local).result())
    assert (digests == expected.total(expected.local())).all()
    both = (digests[of_slices].tolist() for of_slices in numbers[1:])
    return dict(zip(SHAPES, zip(*both, strict=True), strict=True))


def of_rank(mesh: Mesh, tp: int, pp: int, folder: Path) -> tuple[dict, set, int, list[int], dict, Traffic]:
    actor, world = ToyActor.of(mesh, tp, pp), mesh.world_size
    copies = record_whole(actor.load, SPECS, actor.live).copies
    actor.load(hf_tensors())
    everyone = mesh.gather_world(copies)
    plan = make_gather_plan(everyone, SPECS, staging_bytes=2800)
    full: dict = {}
    traffic = Traffic()
    for bucket in gather_buckets(plan, actor.live, mesh, traffic):
        full |= bucket
    spans = [range(live.data_ptr(), live.data_ptr() + live.nbytes) for live in actor.live.values()]
    uncopied = {name for name, tensor in full.items() if any(tensor.data_ptr() in span for span in spans)}
    half = make_gather_plan(everyone, published_specs(SPECS, torch.bfloat16, KEPT), staging_bytes=2800)
    write = lambda buckets: write_hf_folder(  # noqa: E731
        folder / "out", buckets, folder / "like", torch.bfloat16
    )
    gather_to_main(half, actor.live, mesh, write, "export")

    def stop_at_the_second(buckets) -> None:
        next(buckets)
        raise OSError("disk full")

    with pytest.raises(LeaderError, match="rank 0, export: OSError: disk full"):
        gather_to_main(half, actor.live, mesh, stop_at_the_second, "export")  # and nobody hangs
    shares = share_out(everyone, SPECS, on_main=False)
    load = [sum(copy.box.numel for parts in shares.values() for r, copy in parts if r == k) for k in range(world)]
    weights = TrainerWeights(
        mesh, SPECS, everyone, lambda: actor.live, torch.float32, 700, 1, folder, folder, GroupLimits(60)
    )
    digests = expected_by_name(ExpectedDigests(weights))
    return ({name: t.clone() for name, t in full.items()}, uncopied, len(plan.buckets), load, digests, traffic)


@pytest.mark.parametrize(("world", "tp", "pp"), [(1, 1, 1), (3, 1, 3), (4, 2, 2), (4, 2, 1)])
def test_gathered_tensors_are_bit_equal(tmp_path, world, tp, pp):
    (tmp_path / "like").mkdir()
    (tmp_path / "like/config.json").write_text("{}")
    results = run_meshes(world, tmp_path, of_rank, tp, pp, tmp_path, replicas=world // (tp * pp))
    expected = hf_tensors()
    full, uncopied, num_buckets, load, digests, traffic = results[0]
    assert full.keys() == expected.keys() and all(
        torch.equal(full[n].view(torch.int32), t.view(torch.int32)) for n, t in expected.items()
    )
    split = {name for name in expected if tp > 1 and not name.endswith("norm")}
    interleaved = {name for name in expected if name.rpartition(".")[2] in ("q", "k")}
    whole = expected.keys() - split - interleaved
    assert uncopied == whole if world == 1 else uncopied <= whole
    # Of two buckets at a time rank 0 holds the tensors that it put together, and the slices of others for them.
    assert traffic.wire_bytes == 0 and 0 < traffic.staging_bytes <= (2 if world == 1 else 4) * 700
    sent = sum(results[rank][5].wire_bytes for rank in range(world))
    assert (sent == 0) if world == 1 else (sum(4 * expected[name].numel() for name in whole - uncopied) <= sent)
    assert num_buckets > 5 and all(not results[rank][0] for rank in range(1, world))
    exported = HfFolder(tmp_path / "out")
    assert {name for name in exported if exported[name].dtype == torch.float32} == KEPT.keys()
    assert all(torch.equal(exported[n], t.to(KEPT.get(n, torch.bfloat16))) for n, t in expected.items())
    for name, tensor in expected.items():
        start, size = (0,) * tensor.dim(), tuple(tensor.shape)
        rest = slice_digest(tensor[1:], Box((1, *start[1:]), (size[0] - 1, *size[1:])))
        assert digests[name] == (int(slice_digest(tensor, Box(start, size))), int(rest))
    assert sum(load) == sum(t.numel() for t in expected.values())
    if pp == 1:
        assert max(load) <= 1.4 * sum(load) / world, "replicas share the work"
