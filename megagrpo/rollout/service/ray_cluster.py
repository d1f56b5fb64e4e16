"""A running Ray cluster that places engines on its machines."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service.engine_command import ServerPlace
from megagrpo.rollout.service.node import (
    Ask,
    EngineDied,
    EngineNode,
    NodeSilent,
    Placed,
)
from megagrpo.system.errors import explained

_RESERVE_POLL_S = 0.5

# Ray gives its actors methods that a type checker cannot see
_EngineNodeActor: Any = ray.remote(EngineNode)


@contextmanager
def in_ray_cluster(address: str) -> Iterator["RayMachines"]:
    """Connects this process to the Ray cluster at "host:port" inside the block. Raises
    ValueError."""
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        # Ray has no type for some: "The current node timed out during startup" is an Exception
        with explained(f"--ray-address {address}: see whether Ray runs there"):
            ray.init(
                address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False
            )
        yield RayMachines()


class RayMachines:
    """Each node of an engine is a Ray actor, to which Ray assigns a machine and GPUs."""

    def __init__(self) -> None:
        self.num_gpus: float = ray.cluster_resources().get("GPU", 0)

    async def place(
        self,
        config: ExperimentConfig,
        gpus: int,
        place: ServerPlace,
        cores_share: int,
        api_key: str,
    ) -> Placed:
        """Reserves machines within start_timeout_s, and starts an actor on each. Raises
        EngineDied."""
        nodes, limit_s = config.rollout.nodes_per_engine, config.rollout.start_timeout_s
        bundle = {"CPU": 1.0}
        if gpus:
            bundle["GPU"] = float(gpus)
        # Ray fills up one machine before the next, and spreads the nodes of one engine over several
        # if it can.
        group = placement_group(
            [bundle] * nodes, strategy="STRICT_PACK" if nodes == 1 else "SPREAD"
        )
        deadline = time.monotonic() + limit_s
        with ExitStack() as stack:
            stack.callback(remove_placement_group, group)
            # In a thread: Ray's head may take long, and this loop answers the trainers' /status.
            while (await asyncio.to_thread(placement_group_table, group)).get("state") != "CREATED":
                if time.monotonic() > deadline:
                    resources = await asyncio.to_thread(ray.cluster_resources)
                    have = {name: resources[name] for name in ("CPU", "GPU") if name in resources}
                    raise EngineDied(
                        f"{nodes} x {bundle} did not fit on the machines within {limit_s:.0f} s "
                        f"(rollout.start_timeout_s); they have {have} in all. Lower "
                        "rollout.num_engines or rollout.tp, or add machines"
                    )
                await asyncio.sleep(_RESERVE_POLL_S)
            asks = []
            for rank in range(nodes):
                strategy = PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                )
                options = _EngineNodeActor.options(
                    num_cpus=1, num_gpus=gpus, scheduling_strategy=strategy, max_restarts=0
                )
                actor = options.remote(config, replace(place, node_rank=rank), cores_share, api_key)
                stack.callback(ray.kill, actor)
                asks.append(_ask_actor(actor))
            return Placed(asks, stack.pop_all().close)


def _ask_actor(actor: ActorHandle) -> Ask:
    async def ask(method: str, *arguments: object) -> object:
        try:
            return await getattr(actor, method).remote(*arguments)
        except ray.exceptions.ActorUnavailableError as exc:
            raise NodeSilent(str(exc)) from exc
        except ray.exceptions.RayTaskError as exc:  # its machine is reachable, but the call raised
            raise EngineDied(str(exc.cause)) from exc
        except ray.exceptions.RayError as exc:
            raise EngineDied(f"its node was lost: {type(exc).__name__}: {exc}") from exc

    return ask
