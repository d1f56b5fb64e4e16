"""Metrics over real gloo ranks: three ranks give what one rank would, and ranks that disagree are told so."""

from megagrpo.mesh import Mesh
from megagrpo.monitor.metrics import Metrics
from tests.dist.workers.launch import run_meshes

WORLD = 3
# Per rank: (numerator, denominator) of a mean, a sum, an extreme, (amount, seconds) of a rate.
VALUES = [((1.0, 1), 5.0, -3.0, (10, 2.0)), ((7.0, 3), 0.5, 8.0, (30, 4.0)), ((0.0, 0), 1.0, 2.0, (20, 1.0))]
EXPECTED = {"a/max": 8.0, "a/mean": 2.0, "a/rate": 15.0, "a/sum": 6.5}


def measure(rank: int) -> Metrics:
    mean, total, extreme, rate = VALUES[rank]
    metrics = Metrics()
    metrics.add_mean("a/mean", *mean)
    metrics.add_sum("a/sum", total)
    metrics.add_max("a/max", extreme)
    metrics.add_rate("a/rate", *rate)
    return metrics


def of_rank(mesh: Mesh) -> tuple[dict, str, dict]:
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
    for rank, (agreed, error, values) in enumerate(run_meshes(WORLD, tmp_path, of_rank)):
        assert agreed == EXPECTED
        assert "different metrics" in error and ("only/here" in error) == (rank == 1)
        assert values["loss/total"] != values["loss/total"], "a sum with NaN on one rank is NaN on all"
        assert values["optim/grad_norm"] == float("inf"), "a maximum with NaN is not finite"
