"""Agreement of ranks: one integer all-reduce; objects travel only with a value or an error; metrics over ranks."""

import pytest

from megagrpo.mesh import LeaderError, Mesh
from megagrpo.monitor.metrics import Metrics
from megagrpo.weights.transports.gather_plan import gather_copies
from tests.dist.workers.counted import counted_calls
from tests.dist.workers.launch import run_meshes


def fail() -> None:
    raise OSError("disk full")


# Collective -> how often each of torch's calls is made, and what comes out of it on rank r of a world w.
INTEGER = {"all_reduce": 1}
VALUE = INTEGER | {"broadcast_object_list": 1}
CASES = {
    "all true": (lambda mesh: mesh.all_true(True), INTEGER, lambda r, w: True),
    "one false": (lambda mesh: mesh.all_true(mesh.rank > 0), INTEGER, lambda r, w: False),
    "any true": (lambda mesh: mesh.any_true(mesh.rank == mesh.world_size - 1), INTEGER, lambda r, w: True),
    "none true": (lambda mesh: mesh.any_true(False), INTEGER, lambda r, w: False),
    "no error": (lambda mesh: mesh.raise_any(""), INTEGER, lambda r, w: None),
    "no value": (lambda mesh: mesh.from_main(lambda: None, "act"), INTEGER, lambda r, w: None),
    "value": (lambda mesh: mesh.from_main(lambda: [7], "act"), VALUE, lambda r, w: [7]),
    "leader's value": (lambda mesh: mesh.from_leader(lambda: mesh.rank, "act"), VALUE, lambda r, w: r // 2 * 2),
    "one leader's value": (  # of two replicas; the other's is None
        lambda mesh: mesh.from_leader(lambda: 5 if mesh.rank == 0 else None, "act"),
        VALUE,
        lambda r, w: 5 if r < 2 else None,
    ),
    "an error": (
        lambda mesh: mesh.from_main(fail, "save"),
        {"all_reduce": 2, "all_gather_object": 1},
        lambda r, w: "LeaderError: rank 0, save: OSError: disk full",
    ),
    "parts of the leader's": (
        lambda mesh: mesh.cut_by_leader(mesh.rank % 3, lambda part: [mesh.leader, part]),
        {"all_gather_object": 1},
        lambda r, w: [r // 2 * 2, r % 3],
    ),
    # only their digests are gathered
    "lists of two lengths, each sent by one rank and not padded": (
        lambda mesh: gather_copies([mesh.rank % 2] * (1 + mesh.rank % 2), mesh),
        {"all_gather_object": 1, "all_reduce": 2, "broadcast_object_list": 2},
        lambda r, w: [[0], [1, 1]] * (w // 2),
    ),
    "two errors": (
        lambda mesh: mesh.raise_any(f"error {mesh.rank % 2}" if mesh.rank else ""),
        INTEGER | {"all_gather_object": 1},
        lambda r, w: "LeaderError: " + "\n".join(["error 1", "error 0"][: w // 2]),
    ),
}


def of_rank(mesh: Mesh) -> dict:
    found = {}
    for name, (act, *_) in CASES.items():
        with counted_calls() as calls:
            try:
                result = act(mesh)
            except LeaderError as exc:
                result = f"LeaderError: {exc}"
        found[name] = dict(calls), result
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_agree_by_one_integer(world, tmp_path):
    for rank, found in enumerate(run_meshes(world, tmp_path, of_rank, replicas=world // 2)):
        for name, (_, calls, result) in CASES.items():
            assert found[name] == (calls, result(rank, world)), (rank, name)


def part_of_rank(mesh: Mesh) -> list:
    cuts = []
    part = mesh.cut_by_leader("all", lambda part: cuts.append(part) or [mesh.rank, part, b"x" * 100_000])
    assert cuts == ["all"] * mesh.is_leader, "its own part is that of others"
    return part


def test_ranks_pass_a_part_on(tmp_path):
    """The last of four gets it from the second, and all get what the leader has cut."""
    assert run_meshes(4, tmp_path, part_of_rank, replicas=1) == [[0, "all", b"x" * 100_000]] * 4


WORLD = 3
# Per rank: (numerator, denominator) of a mean, a sum, an extreme, (amount, seconds) of a rate.
MEASURED = [((1.0, 1), 5.0, -3.0, (10, 2.0)), ((7.0, 3), 0.5, 8.0, (30, 4.0)), ((0.0, 0), 1.0, 2.0, (20, 1.0))]
EXPECTED = {"a/max": 8.0, "a/mean": 2.0, "a/rate": 15.0, "a/sum": 6.5}


def measure(rank: int) -> Metrics:
    mean, total, extreme, rate = MEASURED[rank]
    metrics = Metrics()
    metrics.add_mean("a/mean", *mean)
    metrics.add_sum("a/sum", total)
    metrics.add_max("a/max", extreme)
    metrics.add_rate("a/rate", *rate)
    return metrics


def metrics_of_rank(mesh: Mesh) -> tuple[dict, str, dict]:
    rank = mesh.rank
    agreed = measure(rank).reduced(mesh.reduce)
    uneven = measure(rank)
    if rank == 1:
        uneven.add_sum("only/here", 1.0)
    broken = measure(rank)
    broken.add_max("optim/grad_norm", float("nan") if rank == 2 else 1.0)
    try:
        error = str(uneven.reduced(mesh.reduce))
    except AssertionError as exc:
        error = str(exc)
    broken.add_mean("loss/total", float("nan") if rank == 2 else 1.0)
    return agreed, error, broken.reduced(mesh.reduce)


def test_ranks_are_combined_as_stated_and_disagreement_raises_on_every_rank(tmp_path):
    for rank, (agreed, error, values) in enumerate(run_meshes(WORLD, tmp_path, metrics_of_rank)):
        assert agreed == EXPECTED
        assert "different metrics" in error and ("only/here" in error) == (rank == 1)
        assert values["loss/total"] != values["loss/total"], "a sum with NaN on one rank is NaN on all"
        assert values["optim/grad_norm"] == float("inf"), "a maximum with NaN is not finite"
