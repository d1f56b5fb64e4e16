"""Engines on several Ray nodes of this machine: placement, a node lost in the middle of a step, and one that joins."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ray_nodes import RayNodes
from running_service import RunningService, running_service
from test_engines import Trainer, experiment, states, wait_until
from tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.verifies("runs", "a Ray node lost and joined; an engine over two nodes"),
]


@pytest.fixture
def nodes():
    # short: Unix socket paths end at 107 characters
    with TemporaryDirectory(prefix="mgr-", ignore_cleanup_errors=True) as folder, RayNodes(Path(folder)) as nodes:
        yield nodes


@contextmanager
def started(nodes: RayNodes, folder: Path, **rollout) -> Iterator[tuple[RunningService, Trainer]]:
    """A service over two nodes, and a trainer."""
    for number in (1, 2):
        nodes.start(number)
    models = [make_tiny_model(folder / f"m{seed}", seed) for seed in range(2)]
    config = experiment(folder / "run", models, **rollout)
    with running_service(config, folder / "run", nodes.address, env=nodes.token) as service:
        trainer = Trainer(service, models)
        try:
            yield service, trainer
        finally:
            trainer.exchange.close()


def test_a_node_is_lost_and_another_joins(nodes, tmp_path):
    """Each node has one slot. The step goes on with the engine that is left; the other is placed again later."""
    with started(nodes, tmp_path) as (service, trainer):
        trainer.publish()
        on_second = [e.id for e in service.control.engines() if e.pid in nodes.pids(2)]
        assert len(on_second) == 1, "one engine on each node"
        lost, other = on_second[0], ({"engine-0", "engine-1"} - set(on_second)).pop()
        undisturbed = trainer.step(1)
        assert trainer.step(1, lambda: nodes.kill(2)) == undisturbed
        wait_until(lambda: states(service)[lost][0] != "ready", "the loss is noticed")
        trainer.publish(1)
        assert states(service)[other] == ("ready", trainer.version, 1)
        trainer.step(2)
        nodes.start(3)
        wait_until(lambda: states(service)[lost][0] == "stale", "placed on the new node")
        trainer.refresh([lost])
        assert states(service)[lost][:2] == ("ready", trainer.version)
        assert any(e.id == lost and e.pid in nodes.pids(3) for e in service.control.engines())


def test_one_engine_over_two_nodes(nodes, tmp_path):
    with started(nodes, tmp_path, num_engines=1, tp=2, nodes_per_engine=2) as (service, trainer):
        for transport, model in (("broadcast", 1), ("disk", 0)):
            trainer.use(transport)
            trainer.publish(model)
            trainer.step(trainer.version)
        assert states(service) == {"engine-0": ("ready", 2, 1)}
        log = (service.run_dir / "logs" / "engine-0.node-1.log").read_text()
        assert "node_rank" in log, "its second server process runs too"
        nodes.kill(2)  # half of the engine
        nodes.start(3)
        service.wait_alive(0)
        wait_until(lambda: states(service)["engine-0"][2] == 2 and service.wait_alive(0), "the whole engine again")
        trainer.step(3)
        assert states(service) == {"engine-0": ("ready", 2, 2)} and trainer.refreshed == [["engine-0"]]
