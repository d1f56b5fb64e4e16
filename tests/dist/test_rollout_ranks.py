"""RolloutSource over gloo ranks, against a service that is played by a real HTTP server."""

import time

import pytest
import torch
import torch.distributed as dist
from fake_service import FakeService, running
from sampling import experiment, sampled, source_of

from megagrpo.mesh import LeaderError, Mesh
from megagrpo.rollout.control import ServiceControl
from megagrpo.types import Prompt, RolloutGroup
from tests.dist.workers.launch import run_meshes

PROMPTS = [Prompt(id=10 * i, text="", token_ids=(1, i), answer="") for i in range(5)]
PROMPTS.append(PROMPTS[0])  # comes twice in one batch: at an epoch's end, or with few prompts


def one_step(mesh: Mesh, url: str) -> dict:
    """What a step gave this rank."""
    control = ServiceControl(url, "key")
    refreshed = []

    def publish(version, engine_ids):
        refreshed.append(engine_ids)
        meeting = torch.ones(1)
        dist.all_reduce(meeting)  # hangs unless every rank is here, as publishing would
        assert meeting.item() == mesh.world_size
        if mesh.is_main:
            control.report("ready", {engine_ids[0]: 1}, version)

    source = source_of(control, experiment(), mesh=mesh)
    try:
        groups, error = sampled(source, 3, PROMPTS, 4, publish), ""
    except LeaderError as exc:
        groups, error = [], str(exc)
    return {"groups": groups, "error": error, "refreshed": refreshed}


def as_others(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """As ranks have them that do not sample."""
    return [group.for_other_ranks() for group in groups]


@pytest.mark.parametrize("world, dp", [(2, 2), (4, 2), (2, 1)])
def test_shares_do_not_depend_on_the_layout(tmp_path, world, dp):
    """Replica by replica the groups are those of one rank, and every rank of a replica has them all."""
    with running(FakeService(version=4)) as service:
        results = run_meshes(world, tmp_path, one_step, service.url, replicas=dp)
    per_replica = [results[d * world // dp]["groups"] for d in range(dp)]
    groups = [group for part in per_replica for group in part]
    assert [(g.group_id, g.prompt) for g in groups] == list(enumerate(PROMPTS))
    for rank, result in enumerate(results):
        assert as_others(result["groups"]) == as_others(per_replica[rank * dp // world]) and result["refreshed"] == []
    if dp == 2:
        assert [len(part) for part in per_replica] == [3, 3]
    assert groups[0].samples != groups[5].samples, "a prompt that comes again gets other responses"


def test_all_ranks_refresh_a_stale_engine_together(tmp_path):
    with running(FakeService(state="stale")) as service:
        results = run_meshes(4, tmp_path, one_step, service.url, replicas=2)
    assert [r["refreshed"] for r in results] == [[["engine-0"]]] * 4
    assert sum(len(results[rank]["groups"]) for rank in (0, 2)) == len(PROMPTS)


def test_a_leaders_failure_reaches_every_rank(tmp_path):
    """One leader's request is refused for good; the other leader and the ranks that only wait learn it at once."""
    with running(FakeService(version=4, script=[400])) as service:
        started = time.monotonic()
        results = run_meshes(4, tmp_path, one_step, service.url, replicas=2)
    assert time.monotonic() - started < 300, "long before the time limits of requests and steps"
    assert len({r["error"] for r in results}) == 1
    assert "train step 3" in results[1]["error"] and "refused a request: on purpose" in results[1]["error"]
