"""Weights to the engines, and whose turn it is on GPUs that trainers and engines share."""

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.control import ServiceControl
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.engines.client import OnCall
from megagrpo.weights.engines.fleet import EngineRegistry, EngineSubset
from megagrpo.weights.exchange import EngineRefresh, Exchange


class Publishing:
    """Publishes weights: to all engines after every step, and during sampling to those that start
    or wake (`refresh`).

    Engines on the trainers' GPUs beside others (rollout.lend_trainers) have an exchange of their
    own. on_call: see Exchange.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        actor: MegatronActor,
        weights: ActorWeights,
        control: ServiceControl,
        on_call: OnCall,
    ):
        def exchange(of: ExperimentConfig, engines: EngineRegistry) -> Exchange:
            return Exchange(of, actor.mesh, weights, engines, config.run_folder.path, on_call)

        self._config, self._actor, self._control = config, actor, control
        self.refresh = EngineRefresh(actor.mesh, self._bring)
        self._lending = False
        self._lent: Exchange | None = None
        if config.rollout.lend_trainers:
            beside = config.rollout.is_beside_trainers
            self._main = exchange(config, EngineSubset(control, lambda engine: not beside(engine)))
            # A lent engine that dies while it wakes is not waited for.
            rollout = config.rollout.model_copy(update={"min_healthy_engines": 0})
            of_lent = config.model_copy(
                update={"rollout": rollout, "weights": config.weights.suited(colocate=True)}
            )
            self._lent = exchange(of_lent, EngineSubset(control, beside))
        else:
            self._main = exchange(config, control)

    def publish(self, version: int) -> dict[str, float]:
        """Collective. Publishes to every engine that is not lent; returns seconds by phase once all
        are verified."""
        if self._config.rollout.colocate:
            self._clear_gpus()
        return {f"publish/{name}": value for name, value in self._main.publish(version).items()}

    def lend(self, version: int) -> dict[str, float]:
        """Collective. rollout.lend_trainers: engines on the trainers' GPUs wake and prove these
        weights.

        Returns the seconds and the bytes.
        """
        assert self._lent is not None, "rollout.lend_trainers is set"
        self._lending = True
        self._clear_gpus()
        found = self._lent.publish(version)
        return {"lend/seconds": found["total"], "lend/wire_bytes": found["wire_bytes"]}

    def take_back(self) -> None:
        """Collective. Engines on the trainers' GPUs release their memory for the update."""
        if self._config.rollout.colocate or self._lending:
            limit_s = sleep_limit_s(self._config)
            self._actor.mesh.from_main(lambda: self._control.sleep(limit_s), "put engines to sleep")
        self._lending = False

    def waiting(self) -> str:
        """Local, any thread. Returns which engines have not answered which call, or ""."""
        return ", ".join(filter(None, (exchange.waiting() for exchange in self._exchanges)))

    def close(self) -> None:
        """Local. Disconnects from the engines."""
        for exchange in self._exchanges:
            exchange.close()

    @property
    def _exchanges(self) -> list[Exchange]:
        return [self._main] if self._lent is None else [self._main, self._lent]

    def _clear_gpus(self) -> None:
        """Collective. Moves what only an update needs to the host, and lets engines start there."""
        self._actor.update_state.offload()
        self._actor.mesh.from_main(self._control.let_start, "let engines start")

    def _bring(self, version: int, engines: list[str]) -> None:
        for exchange in self._exchanges:
            exchange.publish(version, engines)


def sleep_limit_s(config: ExperimentConfig) -> float:
    """Returns the seconds in which all engines fall asleep: one may be starting, and one may not
    answer."""
    return config.rollout.start_timeout_s + config.rollout.patience_s(cuda=True)
