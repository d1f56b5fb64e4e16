"""The plan of a point-to-point transfer, carried out in plain tensors: what arrives is right and comes once."""

from collections import Counter
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.weights.copies.recorder import Copy
from megagrpo.weights.copies.views import Box, ByRows
from megagrpo.weights.expected_digests import ExpectedDigests
from megagrpo.weights.transports.gather_plan import published_specs
from megagrpo.weights.transports.reshard import ReshardTransport
from megagrpo.weights.transports.reshard_plan import make_cover, piece_limit, plan_transfer, trainer_atoms

SPECS = {
    "embed": ((24, 8), torch.float32),
    **{f"expert.{e}.{part}": ((6, 8), torch.float32) for e in range(4) for part in ("gate", "up")},
    **{f"expert.{e}.down": ((8, 6), torch.float32) for e in range(4)},
    "norm": ((8,), torch.float32),
    "scale": ((), torch.float32),
}


EVERYWHERE = (Copy("norm", (0,), (8,), "norm", 0, (1,)), Copy("scale", (), (), "scale", 0, ()))


def rows(name, start, count, parameter, offset=0, width=None):
    """A copy of rows of an HF tensor into a parameter, at an element offset, in rows of `width` elements."""
    columns = SPECS[name][0][1]
    return Copy(name, (start, 0), (count, columns), parameter, offset, (width or columns, 1))


def trainers(tp: int, ep: int, replicas: int) -> list[list[Copy]]:
    """Rows of the embedding over tp; gate and up fused, down transposed, experts over ep; all else everywhere."""
    everyone = []
    for rank in range(tp * ep * replicas):
        t, e = rank % tp, rank // tp % ep
        part = 24 // tp
        copies = [rows("embed", t * part, part, "embedding"), *EVERYWHERE]
        for k in range(4 // ep):
            expert = f"expert.{e * (4 // ep) + k}"
            copies += [rows(f"{expert}.gate", 0, 6, f"fc1.{k}"), rows(f"{expert}.up", 0, 6, f"fc1.{k}", 48)]
            copies.append(Copy(f"{expert}.down", (0, 0), (8, 6), f"fc2.{k}", 0, (1, 8)))
        everyone.append(copies)
    return everyone


def engine(tp: int, ep: int) -> list[list[Copy]]:
    """All experts of a rank in one parameter each for gate and up, and down; the embedding twice, as if untied."""
    ranks = []
    for rank in range(tp):
        part, moe_tp = 24 // tp, tp // ep
        copies = [*(rows("embed", rank * part, part, name) for name in ("embed", "head")), *EVERYWHERE]
        own, t = rank // moe_tp, rank % moe_tp
        half = 6 // moe_tp
        for k in range(4 // ep):
            expert = f"expert.{own * (4 // ep) + k}"
            copies.append(rows(f"{expert}.gate", t * half, half, "w13", k * 16 * half))
            copies.append(rows(f"{expert}.up", t * half, half, "w13", k * 16 * half + 8 * half))
            copies.append(Copy(f"{expert}.down", (0, t * half), (8, half), "w2", k * 8 * half, (half, 1)))
        ranks.append(copies)
    return ranks


def storage(copies: list[Copy], hf: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """The parameters of one rank, flat: filled from HF tensors, or with NaN."""
    sizes = Counter()
    for c in copies:
        last = c.offset + sum((n - 1) * s for n, s in zip(c.size, c.strides, strict=True)) + 1
        sizes[c.parameter] = max(sizes[c.parameter], last)
    live = {name: torch.full((size,), torch.nan) for name, size in sizes.items()}
    for c in copies if hf is not None else ():
        c.view(live).copy_(hf[c.hf][c.box.slices])
    return live


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 512, 96])
@pytest.mark.parametrize("engine_layout", [(1, 1), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("trainer_layout", [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2), (4, 1, 3)])
def test_what_arrives_is_what_the_loader_would_have_written(trainer_layout, engine_layout, bucket_bytes):
    generator = torch.Generator().manual_seed(3)
    hf = {name: torch.randn(shape, generator=generator) for name, (shape, _) in SPECS.items()}
    everyone, receivers, slots = trainers(*trainer_layout), engine(*engine_layout), 2
    atoms = trainer_atoms(everyone, SPECS)
    cover = make_cover(atoms, receivers, SPECS, piece_limit(bucket_bytes))
    assert cover.num_bytes.sum() == 4 * sum(c.box.numel for copies in receivers for c in copies)
    ours = [storage(copies, hf) for copies in everyone]
    for slot in range(slots):
        plan = plan_transfer(cover, slot, slots, bucket_bytes)
        live = [storage(copies, None) for copies in receivers]
        wire = {}
        for rank in range(len(everyone)):
            for m in chain.from_iterable(plan.sent_by(rank).values()):
                assert (rank, m.peer, m.tag) not in wire
                wire[rank, m.peer, m.tag] = torch.cat([part.view(ours[rank]).reshape(-1) for part in m.slices])
        for rank, parameters in enumerate(live):
            for m in chain.from_iterable(plan.received_by(rank).values()):
                values = wire.pop((m.peer, rank, m.tag)).split([part.numel for part in m.slices])
                for part, target in zip(values, (part.view(parameters) for part in m.slices), strict=True):
                    assert target.isnan().all(), "an element is written twice"
                    target.copy_(part.view(target.shape))
        assert not wire, "what is sent is received"
        for copies, parameters in zip(receivers, live, strict=True):
            for name, expected in storage(copies, hf).items():
                assert torch.equal(parameters[name], expected), name


def test_tags_and_batches_agree_on_both_ends_and_batches_are_bounded():
    bucket_bytes = 256
    cover = make_cover(trainer_atoms(trainers(2, 2, 2), SPECS), engine(2, 1), SPECS, piece_limit(bucket_bytes))
    plan = plan_transfer(cover, 0, 1, bucket_bytes)
    for end in (plan.sources, cover.targets):
        for rank in np.unique(end):
            mine = end == rank
            for batch in np.unique(plan.batches[mine]):
                assert cover.num_bytes[mine & (plan.batches == batch)].sum() <= bucket_bytes // 2, "two are in flight"
    assert len(np.unique(plan.batches)) > 1 and cover.num_bytes.max() <= bucket_bytes


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_replicas_share_the_work_evenly_and_serve_few_engines_each(slots):
    everyone = trainers(1, 1, 4)
    cover = make_cover(trainer_atoms(everyone, SPECS), engine(2, 1), SPECS, 16)
    sent, engines_of = Counter(), {rank: set() for rank in range(4)}
    for slot in range(slots):
        plan = plan_transfer(cover, slot, slots, 1 << 20)
        for rank in range(4):
            sent[rank] += int(cover.num_bytes[plan.sources == rank].sum())
            if rank in plan.trainers:
                engines_of[rank].add(slot)
    assert max(sent.values()) - min(sent.values()) <= 64 * slots, sent
    assert max(map(len, engines_of.values())) <= -(-slots // 4) + 1


def test_a_rank_plans_no_batches_of_engines_that_it_does_not_serve_and_equal_engines_share_a_plan():
    weights = SimpleNamespace(
        copies=trainers(1, 1, 2), specs=SPECS, bucket_bytes=1 << 20, num_engines=8, delta=False,
        mesh=SimpleNamespace(rank=1, is_main=False),
    )  # fmt: skip
    transport = ReshardTransport(weights)
    links = [SimpleNamespace(name=f"{slot}", slot=slot, kind=0, carriers=(), num_ranks=2) for slot in range(8)]
    transport._learn(links, SimpleNamespace(kinds=[engine(2, 1)]))
    plans = [transport._plan(link) for link in links]
    assert list(transport._ends) == [link.name for link in links if 1 in transport._plan(link).trainers]
    planned = {plan for plan in plans if "batches" in vars(plan)}
    assert planned == {plan for plan in plans if 1 in plan.trainers} and len(set(plans)) == 2 < len(plans)


def test_coalesced_runs_are_long_where_both_sides_are_contiguous():
    cover = make_cover(trainer_atoms(trainers(1, 1, 1), SPECS), engine(1, 1), SPECS, 1 << 20)
    fused = [part for part in cover.received if part.parameter == "w13"]
    assert [part.size for part in fused] == [(96,)] * 4, "gate and up of one expert are one run on both sides"


def test_a_message_travels_in_one_dtype():
    kept = {"norm": torch.float32, "scale": torch.float32}
    specs, receivers = published_specs(SPECS, torch.bfloat16, kept), engine(2, 1)
    cover = make_cover(trainer_atoms(trainers(2, 1, 1), specs), receivers, specs, 1 << 20)
    numel = [c.box.numel * (4 if c.hf in kept else 2) for copies in receivers for c in copies]
    assert cover.num_bytes.sum() == sum(numel)
    plan = plan_transfer(cover, 0, 1, 1 << 20)
    for batches in [plan.sent_by(rank).values() for rank in range(2)] + [
        plan.received_by(rank).values() for rank in range(2)
    ]:
        for message in chain.from_iterable(batches):
            assert {kept.get(part.parameter, torch.bfloat16) for part in message.slices} == {message.dtype}


def test_a_tensor_that_no_trainer_holds_is_named():
    with pytest.raises(ValueError, match=r"HF tensor norm \(8,\): no trainer rank holds 8 of its 8 elements"):
        trainer_atoms([[c for c in trainers(1, 1, 1)[0] if c.hf != "norm"]], SPECS)


def test_tied_weights_are_sent_from_the_parameter_that_most_ranks_share():
    everyone = [trainers(1, 1, 1)[0] for _ in range(3)]
    everyone[0] = [rows("embed", 0, 24, "output") if c.hf == "embed" else c for c in everyone[0]]
    (atom,) = trainer_atoms(everyone, SPECS)["embed"]
    assert atom.ranks == (1, 2) and atom.copy.parameter == "embedding"


def test_the_same_plan_on_every_rank_whatever_the_lists_share():
    one = trainers(2, 1, 1)
    shared, separate = [one[0], one[1]] * 2, trainers(2, 1, 2)
    assert trainer_atoms(shared, SPECS) == trainer_atoms(separate, SPECS)


def test_the_plan_at_the_size_of_qwen3_235b():
    """94 layers of 128 experts, 128 trainers (tp 4, pp 8, ep 8) to 8 engines of 16 ranks: each element goes once to
    every engine rank that needs it, and no trainer sends much more than another."""
    specs, everyone, receivers = {}, [[] for _ in range(128)], [[] for _ in range(16)]

    def hold(layer: int, name: str, shape: tuple[int, ...], parts: int, axis: int = 0):
        """Cut along `axis` into 4 parts in the trainers, into `parts` in the engines."""
        specs[name] = (shape, torch.bfloat16)

        def cut(number: int, rank: int) -> Copy:
            size = [*shape]
            size[axis] //= number
            start = [0] * len(shape)
            start[axis] = rank * size[axis]
            strides = (size[1], 1) if len(size) == 2 else (1,)
            return Copy(name, tuple(start), tuple(size), name, 0, strides)

        stage = layer * 8 // 94
        for rank in range(stage * 16, stage * 16 + 16):
            everyone[rank].append(cut(4, rank % 4))
        for rank, copies in enumerate(receivers):
            copies.append(cut(parts, rank % parts))

    for layer in range(94):
        prefix = f"layers.{layer}."
        hold(layer, f"{prefix}q", (8192, 4096), 16)
        hold(layer, f"{prefix}k", (512, 4096), 4)  # four heads on sixteen ranks
        hold(layer, f"{prefix}o", (4096, 8192), 16, axis=1)
        stage = layer * 8 // 94
        for expert in range(128):
            for part in ("gate", "up", "down"):
                name = f"{prefix}{expert}.{part}"
                shape = (4096, 1536) if part == "down" else (1536, 4096)
                specs[name] = (shape, torch.bfloat16)
                whole = Copy(name, (0, 0), shape, name, 0, (shape[1], 1))
                for replica in range(2):  # of 16 ranks of a stage, 8 hold different experts
                    everyone[stage * 16 + replica * 8 + expert // 16].append(whole)
                receivers[expert // 8].append(whole)
    bucket = 1 << 30
    cover = make_cover(trainer_atoms(everyone, specs), receivers, specs, piece_limit(bucket))
    needed = sum(copy.box.numel for copies in receivers for copy in copies) * 2
    assert needed == int(cover.num_bytes.sum()) > 450e9
    sent, messages = np.zeros(128, dtype=np.int64), 0
    for slot in range(8):
        plan = plan_transfer(cover, slot, 8, bucket)
        assert all(
            rank in cover.ranks[held] for rank, held in zip(plan.sources[::997], cover.holders[::997], strict=True)
        )
        np.add.at(sent, plan.sources, cover.num_bytes)
        messages += len(np.unique(plan.messages))
    assert sent.sum() == 8 * needed
    assert sent.max() < 1.1 * sent.mean(), "pipeline stages hold 11 or 12 layers"
    assert messages <= 8 * sum(map(len, receivers)), "no tensor is cut without need"


SOME_BOXES = st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 5), st.integers(1, 3)).map(
    lambda b: Box(b[:2], b[2:])
)


@given(st.lists(SOME_BOXES, max_size=8), SOME_BOXES)
def test_an_index_finds_every_box_that_touches_another(boxes, other):
    found = ByRows((box, k) for k, box in enumerate(boxes)).near(other)
    assert len(found) == len(set(found))
    assert {k for k, box in enumerate(boxes) if box.intersect(other)} <= set(found)


def test_scalars_are_near_each_other():
    assert ByRows([(Box((), ()), 0)]).near(Box((), ())) == [0]


def fused(experts: int) -> tuple[dict, list[list[Copy]], list[list[Copy]]]:
    """Tensors of a layer, all experts in one; copies of two trainers with half of them, and of two engine ranks with
    half of each."""

    def copies(chosen: range, top: int, rows: int) -> list[Copy]:
        boxes = [(e, half + top) for e in chosen for half in (0, 4)]
        return [Copy("gate_up", (e, row, 0), (1, rows, 3), f"w{e}.{row}", 0, (0, 3, 1)) for e, row in boxes]

    half = experts // 2
    holders = [copies(range(half), 0, 4), copies(range(half, experts), 0, 4)]
    receivers = [copies(range(experts), 2 * rank, 2) for rank in range(2)]
    return {"gate_up": ((experts, 8, 3), torch.float32)}, holders, receivers


def test_boxes_of_fused_experts_are_compared_with_those_of_their_own_expert(monkeypatch):
    """All with all would take an hour to plan 60 layers of 512 experts, with the engines paused."""
    calls = Counter()
    for name in ("intersect", "subtract"):
        method = getattr(Box, name)

        def counted(box, other, name=name, method=method):
            calls[name] += 1
            return method(box, other)

        monkeypatch.setattr(Box, name, counted)
    numbers = []
    for experts in (8, 32):
        calls.clear()
        specs, holders, receivers = fused(experts)
        weights = SimpleNamespace(mesh=SimpleNamespace(rank=1), copies=holders, specs=specs)
        cover = make_cover(trainer_atoms(holders, specs), receivers, specs, 1 << 20)
        assert cover.num_bytes.sum() == experts * 8 * 3 * 4
        digests = ExpectedDigests(weights)
        digests.add(receivers)
        numbers.append(calls.total())
    assert numbers[1] == 4 * numbers[0], "as many for every expert"
