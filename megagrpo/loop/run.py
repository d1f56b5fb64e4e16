"""Builds the parts of the loop from the configuration on every rank, user errors first."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megagrpo.actor.megatron_actor import MegatronActor, NonFiniteUpdate
from megagrpo.actor.saving import save_actor
from megagrpo.actor.start import initial_weights, make_actor, plan_schedule, steps_in_all
from megagrpo.actor.step import holds_token_values
from megagrpo.batching.batch import build_batch
from megagrpo.batching.sample_rows import LossNeeds
from megagrpo.checkpoint.changes import record_start
from megagrpo.checkpoint.resume import (
    find_checkpoint,
    resume,
    run_identity,
    run_inputs,
)
from megagrpo.checkpoint.save import Checkpointer, RunIdentity
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import LeaderError, Mesh, RunStopped
from megagrpo.monitor.alarms import MismatchAlarm
from megagrpo.monitor.console import StepConsole
from megagrpo.monitor.dump import write_dump
from megagrpo.monitor.metrics import Metrics
from megagrpo.monitor.run_record import RunRecord
from megagrpo.monitor.watchdog import Watchdog
from megagrpo.rollout.batches import BatchPlan, SampledBatch, StepBatches
from megagrpo.rollout.control import ServiceControl, find_service, service_progress
from megagrpo.rollout.group_metrics import group_metrics
from megagrpo.rollout.source import Inputs, RolloutSource, start_source
from megagrpo.system import environment
from megagrpo.system.progress import Progress
from megagrpo.system.stop_request import STOP_FILE, StopRequest
from megagrpo.types import AlgoState, Batch, RolloutGroup, TrainState, Updates
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.exchange import Exchange
from megagrpo.weights.hf_export import export_hf

_PHASES = {
    "publish": "publishes weights to the engines",
    "evaluate": "evaluates",
    "rollout": "samples",
}  # as progress


@dataclass
class Run:
    """One training run on this rank. `state.step` counts finished steps and is the version of the
    actor's weights."""

    config: ExperimentConfig
    actor: MegatronActor
    state: TrainState
    num_steps: int  # after which it ends
    updates_done: int  # in the finished steps
    inputs: Inputs
    control: ServiceControl
    source: RolloutSource
    exchange: Exchange
    recording: RunRecord
    checkpointer: Checkpointer
    watchdog: Watchdog
    progress: Progress
    alarm: MismatchAlarm
    # None if another launcher started the ranks: it sends no stop requests
    stop_request: StopRequest | None
    evaluation_stopped: bool = False  # by the stop request: the next start makes it

    @property
    def mesh(self) -> Mesh:
        """The actor's ranks."""
        return self.actor.mesh

    def enter(self, phase: str) -> None:
        """Records that this rank starts phase `phase` of the step."""
        self.watchdog.enter(phase)
        if phase == "checkpoint":  # the first of a step
            self.progress.calm()
        self.progress.enter(
            _PHASES.get(phase, phase), lambda: self.source.progress() or self.exchange.waiting()
        )

    def save_on_schedule(self) -> None:
        """Collective. Saves the state if the schedule says so, and then makes its weights the
        reference if the KL asks for it."""
        if self.checkpointer.on_schedule(self.state, self.mesh.any_true(self.asked())):
            self.actor.keep_reference()

    def publish(self) -> dict[str, float]:
        """Collective. Publishes weights of version `state.step` to every engine; returns seconds by
        phase."""
        if self.config.weights.in_flight == "drain" and self.config.rollout.max_staleness:
            self.enter("drain")
            self.source.drain()
        self.enter("publish")
        if self.config.rollout.colocate:
            self.actor.update_state.offload()
            self.mesh.from_main(self.control.let_start, "let engines start")
        report = self.exchange.publish(self.state.step)
        return {f"publish/{name}": value for name, value in report.items()}

    def next_groups(self, metrics: Metrics) -> StepBatches:
        """Collective. Returns this rank's share of the step's groups, sampled and scored, and takes
        the GPUs back that engines share with trainers."""
        if self.stop_request is not None and self.state.step == self.recording.start_step:
            self.stop_request.listen(True)
        step = self.source.begin_step(self.state, self._steps_left)
        while plan := step.wanted():
            step.add(self._groups(self.source.begin(plan)))
        self.source.end_step(step, metrics)
        sources = self.inputs.prompts.sources
        group_metrics(metrics, step.groups, self.config, sources, self.mesh)
        self.inputs.add_metrics(metrics)
        if self.config.rollout.colocate:
            self.mesh.from_main(
                lambda: self.control.sleep(self.config.rollout.sleep_limit_s),
                "put engines to sleep",
            )
        return step

    def _groups(
        self, batch: SampledBatch, stop_requested: Callable[[], bool] = lambda: False
    ) -> list[RolloutGroup]:
        """Collective. Waits for this rank's groups of a batch; an engine that comes back meanwhile
        gets weights."""
        version = self.state.step
        with ExitStack() as failure:
            failure.callback(batch.end)
            while outdated := self.source.wait([batch], version, stop_requested):
                self.exchange.publish(version, outdated)
            failure.pop_all()
        return self.source.take(batch)

    @property
    def _steps_left(self) -> int:
        return self.num_steps - self.state.step

    def finish_step(self, sampled: StepBatches, algo_state: AlgoState) -> None:
        """Makes `state` that after the step, whose updates are made. Not earlier: until then it is
        that of the weights, and a checkpoint of the steps before holds the groups."""
        sampled.finish()
        self.state.algo_state = algo_state
        self.updates_done = self.actor.updates_done
        plan_schedule(self.actor, self.config.train, self._steps_left)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Collective. Saves the steps that this start has finished if a RunStopped, which every
        rank raises, ends the block; unless updates of an unfinished step have changed the
        weights."""
        try:
            yield
        except RunStopped as stopped:
            try:
                self.enter("checkpoint")
                finished = self.state.step > self.recording.start_step
                if finished and self.actor.updates_done == self.updates_done:
                    self.checkpointer.save_now(self.state)
                self.checkpointer.complete()
            except LeaderError as exc:
                raise RunStopped(
                    f"{stopped}\nand the state after step {self.state.step} could not be saved: {exc}"
                ) from stopped
            raise

    def build_batch(self, sampled: StepBatches, updates: Updates) -> Batch:
        """Collective. Returns this rank's share of the step's samples, with their lags if weights
        may differ; keeps of the groups what the record needs."""
        config = self.config
        # a surplus of dynamic sampling comes from the step before
        older = config.rollout.max_staleness or config.algorithm.dynamic_sampling
        version = self.state.step if older else None
        layers = self.actor.routed_layers if config.actor.routing_replay == "rollout" else None
        # on the leader for a dump
        candidates = self.mesh.is_leader or self.actor.on_last_stage
        needs = LossNeeds(config.algorithm, config.graders_apart, candidates)
        batch = build_batch(
            sampled.groups, updates, self.mesh, self.actor.arch, version, layers, needs
        )
        sampled.forget_values()
        return batch

    def evaluation_groups(self, as_trained: bool = False) -> list[RolloutGroup]:
        """Collective. Returns this rank's groups of the evaluation, or of the one that samples as
        training does."""
        self.enter("evaluate")
        prompts = self.inputs.eval_prompts
        assert prompts is not None, "called only with an eval section"
        plan = BatchPlan.evaluation(self.config, prompts.prompts, self.state.step, as_trained)
        return self._groups(self.source.begin(plan), self.asked)

    def inspect_update(
        self, batch: Batch, algorithm: AlgorithmConfig, values: dict[str, float], logprobs: Tensor
    ) -> None:
        """Collective. Dumps the step's batch if log.dump_steps has the step or an update was not
        finite.

        In the first step it compares trainer and engine. Records the trained samples with the
        trainer's log-probabilities [T]. Raises NonFiniteUpdate on every rank unless
        train.non_finite is skip.
        """
        step = self.state.step + 1
        bad = values["optim/non_finite_updates"]
        if alarm := self.alarm.judge(batch, logprobs, holds_token_values(), self.mesh):
            self.recording.note(alarm)
        self.recording.log_trained(step, batch, logprobs)
        folder = self.recording.folder.dump(step)
        if bad or step in self.config.log.dump_steps:
            write_dump(
                folder,
                batch,
                algorithm,
                self.state.step,
                values,
                self.mesh,
                self.actor.routed_layers,
            )
        if bad:
            text = (
                f"step {step}: loss or gradient of {bad:.0f} update(s) is not finite, these were not "
                f"taken; the batch is in {folder}"
            )
            if self.config.train.non_finite == "halt":
                raise NonFiniteUpdate(
                    f"{text} (`megagrpo replay`). train.non_finite: skip would go on"
                )
            self.recording.note(text)

    def asked(self) -> bool:
        """Local. Returns whether this node received a stop request."""
        return self.stop_request is not None and self.stop_request.made()

    def stopping(self) -> bool:
        """Collective. Returns whether a node received a stop request (pre-emption, time limit)
        before the last step and its evaluation, and then saves."""
        request = self.stop_request
        done = self._steps_left == 0 and not self.evaluation_stopped
        if done or not self.mesh.any_true(self.asked()):
            return False
        self.checkpointer.save_now(self.state)
        final = self.mesh.any_true(request is not None and request.final())
        if request is not None:
            request.grant(self.state.step, final)
        self.recording.note(
            f"stops after step {self.state.step}, as asked; the next start goes on from there"
        )
        return True

    def log(self, values: dict[str, float], groups: Sequence[RolloutGroup] | None = None) -> None:
        """Adds one entry to the run's record: the main rank's metrics, and each replica's
        groups."""
        with ExitStack() as stack:
            if isinstance(sys.exception(), RunStopped):
                # the other ranks save now, and wait for this one whatever its disk does
                stack.enter_context(suppress(OSError))
            self.recording.log(self.state.step, values, groups)


@contextmanager
def start_run(
    config: ExperimentConfig, service_url: str | None, device: torch.device, progress: Progress
) -> Iterator[Run]:
    """Collective. Builds the run; parts that need no other process come first, so that user errors
    end it early."""
    progress.enter("reads prompts and the tokenizer")
    folder = config.run_folder
    stop_request = _stop_request()
    rollout = config.rollout
    if rollout.colocate:  # before any rank allocates memory on a GPU that an engine uses
        find_service(folder.path, service_url, rollout.start_timeout_s).sleep(rollout.sleep_limit_s)
    inputs = Inputs.load(config)
    actor, weights, identity, state = _loaded_actor(config, inputs, device, progress)
    mesh = actor.mesh
    num_steps = steps_in_all(config, len(inputs.prompts), state)
    plan_schedule(actor, config.train, num_steps - state.step)
    with ExitStack() as stack:
        stack.callback(progress.enter, "")  # what else is printed begins a line
        console = _console(config, state, num_steps, inputs, progress, mesh.is_main)
        progress.enter("waits for the engines", lambda: service_progress(folder))
        control = find_service(folder.path, service_url, rollout.start_timeout_s)
        recording = stack.enter_context(RunRecord(config, mesh, state.step, console))
        watchdog = stack.enter_context(Watchdog(config, mesh, folder, lambda: state.step))
        exchange = Exchange(config, mesh, weights, control, folder.path)
        source = stack.enter_context(start_source(config, mesh, inputs, control, watchdog.alive))
        stack.callback(exchange.close)  # else engines wait in the group for a trainer that ended
        watchdog.waits += [source.waiting, exchange.waiting]
        recording.open(inputs.tokenizer, inputs.decode, holds_token_values())
        changes = mesh.from_main(lambda: record_start(config, state.step), "write the settings")
        for line in changes:
            recording.note(line)
        source.batches.restore(state, changes)
        run = Run(
            config=config,
            actor=actor,
            state=state,
            num_steps=num_steps,
            updates_done=actor.updates_done,
            inputs=inputs,
            control=control,
            source=source,
            exchange=exchange,
            recording=recording,
            checkpointer=_checkpointer(
                config, actor, weights, identity, source, recording, num_steps
            ),
            watchdog=watchdog,
            progress=progress,
            alarm=MismatchAlarm(config, actor.arch.is_moe),
            stop_request=stop_request,
        )
        with run.saving():
            yield run


def _stop_request() -> StopRequest | None:
    path = environment.get(STOP_FILE)
    if path is None:
        return None
    request = StopRequest(Path(path))
    request.listen(False)  # the ranks may have been restarted
    return request


def _loaded_actor(
    config: ExperimentConfig, inputs: Inputs, device: torch.device, progress: Progress
) -> tuple[MegatronActor, ActorWeights, RunIdentity, TrainState]:
    """Collective. Returns the actor, with the weights of a checkpoint or of the model, and what the
    run continues from."""
    progress.enter(f"{config.actor.world_size} trainer ranks meet and build the model")
    actor = make_actor(config, inputs.model.arch, device)
    actor.images = inputs.images.pixels if inputs.images else None
    _refuse_other_rows(actor.mesh.gather_world(inputs.rows))
    progress.enter("loads weights")
    checkpoint = find_checkpoint(config, actor.mesh)
    weights = initial_weights(config, config.algorithm, checkpoint, actor)
    rows = inputs.prompts.rows
    identity = run_identity(config, actor, rows, run_inputs(config, actor.mesh))
    return actor, weights, identity, resume(config, checkpoint, identity, actor)


def _refuse_other_rows(rows_by_rank: Sequence[list]) -> None:
    """Raises ValueError unless all ranks have read the same rows, given as their fingerprints."""
    for rank, rows in enumerate(rows_by_rank):
        if rows != rows_by_rank[0]:
            raise ValueError(
                f"rank {rank} has read other rows than rank 0: {rows} and {rows_by_rank[0]} (file, rows "
                "in use, digest); a file of data is being written, or differs between nodes"
            )


def _checkpointer(
    config: ExperimentConfig,
    actor: MegatronActor,
    weights: ActorWeights,
    identity: RunIdentity,
    source: RolloutSource,
    recording: RunRecord,
    num_steps: int,
) -> Checkpointer:
    asynchronous = config.checkpoint.asynchronous
    background = environment.num_trainer_nodes() > 1 if asynchronous == "auto" else asynchronous

    def with_groups(state: TrainState) -> TrainState:
        recording.flush()
        return replace(state, ahead=source.batches.finished())

    def export(folder: Path) -> None:
        export_hf(folder, weights, actor.mesh, config, config.model.path)

    return Checkpointer(
        config.checkpoint,
        recording.folder.checkpoints,
        identity,
        lambda part, reshardable: save_actor(actor, part, reshardable, snapshot=background),
        with_groups,
        actor.mesh,
        num_steps,
        recording.start_step,
        background,
        export,
        config.algorithm.moved_reference,
    )


def _console(
    config: ExperimentConfig,
    state: TrainState,
    num_steps: int,
    inputs: Inputs,
    progress: Progress,
    is_main: bool,
) -> StepConsole | None:
    """Makes the main rank's console and prints the run's summary before the first sample."""
    if not is_main:
        return None
    console = StepConsole(config.name, num_steps, state.step)
    progress.follow(console.note, console.bar)
    notes = [*inputs.dropped]
    if restarts := environment.get_int("TORCHELASTIC_RESTART_COUNT", 0):
        notes.append(
            "a rank was lost; restarted all ranks "
            f"(restart {restarts} of {config.actor.max_restarts})"
        )
    if state.step:
        notes.append(f"continues after step {state.step}")
    for note in notes:
        console.note(note)
    return console
