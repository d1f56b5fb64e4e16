"""Weights to the engines, and whose turn it is on GPUs that trainers and engines share."""

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.control import ServiceControl
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.engines.client import OnCall
from megagrpo.weights.exchange import Exchange


class Publishing:
    """Publishes weights: to all engines after every step, and during sampling to those that start.

    on_call: see Exchange.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        actor: MegatronActor,
        weights: ActorWeights,
        control: ServiceControl,
        on_call: OnCall,
    ):
        self._config, self._actor, self._control = config, actor, control
        self._exchange = Exchange(
            config, actor.mesh, weights, control, config.run_folder.path, on_call
        )

    def publish(self, version: int) -> dict[str, float]:
        """Collective. Publishes to every engine; returns seconds by phase once all are verified."""
        if self._config.rollout.colocate:
            self._actor.update_state.offload()
            self._actor.mesh.from_main(self._control.let_start, "let engines start")
        return {f"publish/{name}": value for name, value in self._exchange.publish(version).items()}

    def update_engines(self, version: int, engines: list[str]) -> None:
        """Collective. Publishes to the engines of these ids, which have started meanwhile."""
        self._exchange.publish(version, engines)

    def take_back(self) -> None:
        """Collective. Engines on the trainers' GPUs release their memory for the update."""
        if self._config.rollout.colocate:
            limit_s = sleep_limit_s(self._config)
            self._actor.mesh.from_main(lambda: self._control.sleep(limit_s), "put engines to sleep")

    def waiting(self) -> str:
        """Local, any thread. Returns which engines have not answered which call, or ""."""
        return self._exchange.waiting()

    def close(self) -> None:
        """Local. Disconnects from the engines."""
        self._exchange.close()


def sleep_limit_s(config: ExperimentConfig) -> float:
    """Returns the seconds in which all engines fall asleep: one may be starting, and one may not
    answer."""
    return config.rollout.start_timeout_s + config.rollout.patience_s(cuda=True)
