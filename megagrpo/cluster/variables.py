"""Environment variables of trainer ranks, in addition to those of every process (Launch) and of the user.

docs/evidence/gpu.md lists the environment of every process of a run.
"""

from contextlib import suppress

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service.addresses import interface_of, own_address
from megagrpo.system import environment


def of_trainers(config: ExperimentConfig, interface: str | None = None) -> dict[str, str]:
    """Returns the variables of this actor's ranks. interface: the one towards other ranks and engines."""
    if config.actor.device == "cpu":
        return {}
    parallel = config.actor.parallel
    variables = environment.of_trainer_ranks(
        cut=parallel.tp > 1 or parallel.cp > 1,
        beside_engines=config.rollout.colocate,
        deterministic=config.rollout.deterministic,
    )
    chosen = environment.get("NCCL_SOCKET_IFNAME") or interface
    return variables | ({"NCCL_SOCKET_IFNAME": chosen} if chosen else {})


def interface_of_engines(config: ExperimentConfig) -> str | None:
    """Returns the interface for engines on this machine; None if rollout.host is not an address of it."""
    with suppress(ValueError):  # an address of the rollout's machines
        return interface_of(own_address(config.rollout.host))
    return None
