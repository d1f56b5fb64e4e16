"""Builds the parts of the loop from the configuration on every rank, user errors first."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megagrpo.actor.megatron_actor import MegatronActor, NonFiniteUpdate
from megagrpo.actor.saving import save_actor
from megagrpo.actor.step import holds_token_values
from megagrpo.batching.batch import build_batch
from megagrpo.checkpoint.resume import (
    find_checkpoint,
    initial_weights,
    make_actor,
    resume,
    run_identity,
    steps_in_all,
)
from megagrpo.checkpoint.save import Checkpointer, SaveSchedule
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.images import ImageStore
from megagrpo.data.prompts import PromptSet, decoder, describe_dropped, load_prompts, load_tokenizer
from megagrpo.mesh import LeaderError, Mesh, RunStopped
from megagrpo.monitor.alarm import HealthWatch, MismatchAlarm
from megagrpo.monitor.console import StepConsole
from megagrpo.monitor.dump import write_dump
from megagrpo.monitor.metrics import Metrics
from megagrpo.monitor.record import StepLog
from megagrpo.monitor.rollouts import Decode, RolloutLog
from megagrpo.monitor.timeline import Timeline
from megagrpo.monitor.trained import TrainedLog
from megagrpo.monitor.wandb_log import WandbLog
from megagrpo.monitor.watchdog import Watchdog
from megagrpo.publishing import Publishing, sleep_limit_s
from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout.agents.environments import Environments
from megagrpo.rollout.agents.programs import Programs
from megagrpo.rollout.control import find_service, service_progress
from megagrpo.rollout.generation import SamplingParams
from megagrpo.rollout.metrics import grader_metrics, rollout_metrics, source_metrics
from megagrpo.rollout.sampler import Sampler
from megagrpo.rollout.selection import GroupChoice, StepGroups, gather_surplus
from megagrpo.rollout.source import RolloutSource
from megagrpo.rollout.tools import Tool, make_answering
from megagrpo.system import environment
from megagrpo.system.progress import Progress
from megagrpo.system.stop_request import STOP_FILE, StopRequest
from megagrpo.types import Batch, RolloutGroup, TrainState, Updates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PHASES = {
    "publish": "publishes weights to the engines",
    "evaluate": "evaluates",
    "rollout": "samples",
}  # as progress


@dataclass(frozen=True)
class Inputs:
    """The inputs that a run reads before it needs any other process."""

    tokenizer: "PreTrainedTokenizerBase"
    decode: Decode
    prompts: PromptSet
    eval_prompts: PromptSet | None
    tool: Tool | Environments | Programs | None
    images: ImageStore | None  # of a vision-language model

    @classmethod
    def load(cls, config: ExperimentConfig) -> "Inputs":
        """Loads the inputs of an experiment. Raises ValueError."""
        tokenizer = load_tokenizer(config.model)
        images = ImageStore.of(config.model, config.run_folder.images)
        prompts = load_prompts(config.data, tokenizer, images)
        eval_prompts = load_prompts(config.eval.data, tokenizer, images) if config.eval else None
        return cls(
            tokenizer,
            decoder(tokenizer),
            prompts,
            eval_prompts,
            make_answering(config, tokenizer),
            images,
        )

    def close(self) -> None:
        """Ends the processes of environments and agents."""
        if isinstance(self.tool, Environments | Programs):
            self.tool.close()


class RunRecord:
    """The record of a run: the main rank's metrics, each replica's groups, every rank's
    timeline."""

    def __init__(self, config: ExperimentConfig, mesh: Mesh, start_step: int):
        self.folder = config.run_folder
        self.timeline = Timeline(
            self.folder, mesh.rank, mesh.world_size, start_step, config.log.timeline
        )
        self._config, self._mesh, self._start_step = config, mesh, start_step
        self._rollouts: RolloutLog | None = None  # on the replica's rank that samples
        self._trained: TrainedLog | None = None  # on the replica's rank that has the tokens' values
        self._console: StepConsole | None = None  # on the main rank
        self._outputs: list[
            Callable[[int, dict[str, float]], None]
        ] = []  # of metrics, on the main rank

    @contextmanager
    def open(self, inputs: Inputs, console: StepConsole | None) -> Iterator[None]:
        """Opens this rank's logs; their background writes are on disk at the end."""
        config, mesh, start = self._config, self._mesh, self._start_step
        replica = (self.folder, mesh.dp_rank, mesh.dp_size)

        def pieces(token_ids: Sequence[int]) -> list[str]:
            return [str(inputs.tokenizer.decode([token])) for token in token_ids]

        with ExitStack() as stack:
            if config.log.rollouts and holds_token_values():
                self._trained = stack.enter_context(
                    closing(TrainedLog(*replica, config.log.tokens, pieces, start))
                )
            if config.log.rollouts and mesh.is_leader:
                self._rollouts = stack.enter_context(
                    closing(RolloutLog(*replica, start, inputs.decode))
                )
            if console is not None:
                step_log = stack.enter_context(closing(StepLog(self.folder, config.log, start)))
                wandb_log = stack.enter_context(WandbLog(config, self.folder, start, console.note))
                health = HealthWatch(config.log.alarms, console.note)
                self._console, self._outputs = (
                    console,
                    [step_log.write, wandb_log.write, console.update, health.see],
                )
            yield

    def log(
        self, step: int, values: dict[str, float], groups: Sequence[RolloutGroup] | None
    ) -> None:
        """Adds one entry."""
        if self._rollouts is not None and groups is not None:
            self._rollouts.write(step, groups)
        for write in self._outputs:
            write(step, values)
        self.timeline.end_step(step)

    def log_trained(self, step: int, batch: Batch, logprobs: Tensor) -> None:
        """Adds the batch of an update with the trainer's log-probabilities [T]."""
        if self._trained is not None:
            self._trained.write(step, batch, logprobs)

    def note(self, text: str) -> None:
        """Prints a line on the main rank's console."""
        if self._console is not None:
            self._console.note(text)

    def flush(self) -> None:
        """Waits until the groups are on disk: a later start never samples groups before a
        checkpoint again."""
        if self._rollouts is not None:
            self._rollouts.flush()


@dataclass
class Run:
    """One training run on this rank. `state.step` counts finished steps and is the version of the
    actor's weights."""

    config: ExperimentConfig
    actor: MegatronActor
    state: TrainState
    num_steps: int  # after which it ends
    inputs: Inputs
    source: RolloutSource
    publishing: Publishing
    recording: RunRecord
    checkpointer: Checkpointer
    watchdog: Watchdog
    alarm: MismatchAlarm
    stop_request: (
        StopRequest | None
    )  # None if another launcher started the ranks: it sends no stop requests

    @property
    def mesh(self) -> Mesh:
        """The actor's ranks."""
        return self.actor.mesh

    def publish(self) -> dict[str, float]:
        """Collective. Publishes weights of version `state.step` to every engine; returns seconds by
        phase."""
        if self.config.weights.in_flight == "drain" and self.config.rollout.max_staleness:
            self.watchdog.enter("drain")
            self.source.drain()
        self.watchdog.enter("publish")
        return self.publishing.publish(self.state.step)

    def next_groups(self, metrics: Metrics) -> list[RolloutGroup]:
        """Collective. Returns this rank's share of the step's groups, sampled and scored.

        If that fails, it saves the state of the finished steps before it raises RunStopped on every
        rank.
        """
        try:
            groups = self._sampled(metrics)
        except RunStopped as stopped:
            try:
                self.checkpointer.save_now(self.state)
            except LeaderError as exc:
                problem = f"the state after step {self.state.step} could not be saved: {exc}"
                raise RunStopped(f"{stopped}\nand {problem}") from stopped
            raise
        return groups

    def _sampled(self, metrics: Metrics) -> list[RolloutGroup]:
        """Collective. Samples while the trainers' GPUs, if engines share them, are the engines'."""
        chosen = self._chosen(metrics)
        self.publishing.take_back()
        # Not before: until the step can begin, a checkpoint of the steps before it holds its
        # groups.
        state = self.state
        state.data_cursor, state.surplus = chosen.data_cursor, chosen.surplus
        self.source.drop_consumed()
        return chosen.groups

    def _chosen(self, metrics: Metrics) -> StepGroups:
        """Collective. Returns this rank's groups of the step after `state`. Raises RunStopped on
        every rank."""
        config, inputs = self.config, self.inputs
        choice = GroupChoice(self.source, inputs.prompts, config, self.mesh)
        step = choice.next_groups(self.state, metrics, self.num_steps - self.state.step)
        grader_metrics(metrics, step.groups, config.reward)
        source_metrics(metrics, step.groups, inputs.prompts.sources)
        rollout_metrics(metrics, step.groups, self.mesh, config.train)
        for part in (inputs.tool, inputs.images):
            if isinstance(part, Environments | Programs | ImageStore):
                part.add_metrics(metrics)
        return step

    def build_batch(self, groups: Sequence[RolloutGroup], updates: Updates) -> Batch:
        """Collective. Returns this rank's share of the step's samples, with their lags if weights
        may differ."""
        version = self.state.step if self.config.rollout.max_staleness else None
        layers = self.actor.routed_layers if self.config.actor.routing_replay == "rollout" else None
        return build_batch(groups, updates, self.mesh, self.actor.arch, version, layers)

    def evaluation_groups(self, as_trained: bool = False) -> list[RolloutGroup]:
        """Collective. Returns this rank's groups of the evaluation, or of the one that samples as
        training does."""
        self.watchdog.enter("evaluate")
        config, prompts = self.config.eval, self.inputs.eval_prompts
        assert config is not None and prompts is not None, "called only with an eval section"
        params = SamplingParams.of_evaluation(self.config.sampling, config, as_trained)
        num_samples = config.num_as_trained if as_trained else config.num_samples
        return self.source.evaluate(prompts.prompts, self.state.step, params, num_samples)

    @property
    def eval_sources(self) -> list[str]:
        """The names of the sources of the evaluation's prompts."""
        return prompts.sources if (prompts := self.inputs.eval_prompts) else []

    def inspect_update(
        self, batch: Batch, algorithm: AlgorithmConfig, values: dict[str, float], logprobs: Tensor
    ) -> None:
        """Collective. Dumps the step's batch if log.dump_steps has the step or an update was not
        finite.

        In the first step it compares trainer and engine. Records the trained samples with the
        trainer's log-probabilities [T]. Raises NonFiniteUpdate on every rank unless
        train.non_finite is skip.
        """
        step, bad = self.state.step + 1, values["optim/non_finite_updates"]
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
            which = f"step {step}: loss or gradient of {bad:.0f} update(s) is not finite"
            text = f"{which}, these were not taken; the batch is in {folder}"
            if self.config.train.non_finite == "halt":
                raise NonFiniteUpdate(
                    f"{text} (`megagrpo replay`). train.non_finite: skip would go on"
                )
            self.recording.note(text)

    def checkpoint(self) -> None:
        """Collective. Saves on schedule and after the last step."""
        self.checkpointer.on_schedule(self.state)

    def stopping(self) -> bool:
        """Collective. Returns whether a node received a stop request (pre-emption, time limit), and
        then saves."""
        if not self.mesh.any_true(self.stop_request is not None and self.stop_request.made()):
            return False
        self.checkpointer.save_now(self.state)
        if self.stop_request is not None:
            self.stop_request.grant(self.state.step)
        self.recording.note(
            f"stops after step {self.state.step}, as asked; the next start goes on from there"
        )
        return True

    def log(self, values: dict[str, float], groups: Sequence[RolloutGroup] | None = None) -> None:
        """Adds one entry to the run's record: the main rank's metrics, and each replica's
        groups."""
        self.recording.log(self.state.step, values, groups)


@contextmanager
def start_run(
    config: ExperimentConfig, service_url: str | None, device: torch.device, progress: Progress
) -> Iterator[Run]:
    """Collective. Builds the run; parts that need no other process come first, so that user errors
    end it early."""
    progress.enter("reads prompts and the tokenizer")
    folder, start_timeout_s = config.run_folder, config.rollout.start_timeout_s
    if config.rollout.colocate:  # before any rank allocates memory on a GPU that an engine uses
        find_service(folder.path, service_url, start_timeout_s).sleep(sleep_limit_s(config))
    inputs = Inputs.load(config)
    progress.enter(f"{config.actor.world_size} trainer ranks meet and build the model")
    actor = make_actor(config, config.train.steps(len(inputs.prompts)), device)
    actor.images, mesh = inputs.images.pixels if inputs.images else None, actor.mesh
    progress.enter("loads weights")
    source = find_checkpoint(config, folder, mesh)
    weights = initial_weights(config, config.algorithm, source, actor)
    state = resume(config, folder, source, actor)
    num_steps = steps_in_all(config, len(inputs.prompts), state, actor)
    with ExitStack() as stack:
        console = (
            stack.enter_context(_console(config, state, num_steps, inputs))
            if mesh.is_main
            else None
        )
        if console is not None:
            progress.follow(console.status)
        progress.enter("waits for the engines", lambda: service_progress(folder))
        control = find_service(folder.path, service_url, start_timeout_s)
        record = RunRecord(config, mesh, state.step)
        stack.callback(record.timeline.close)

        def enter(phase: str) -> None:
            record.timeline.mark(phase)
            if phase == "checkpoint":  # the first of a step
                progress.calm()
            progress.enter(
                _PHASES.get(phase, phase), lambda: rollouts.progress() or publishing.waiting()
            )

        watchdog = stack.enter_context(Watchdog(config, mesh, folder, lambda: state.step, enter))
        publishing = Publishing(config, actor, weights, control, record.timeline.call)
        sampler = None
        if mesh.is_leader:
            pool = stack.enter_context(
                RewardPool(config.reward, preload=not config.sampling.rewarding)
            )
            stack.callback(inputs.close)
            sampler = Sampler(
                config,
                mesh.dp_size,
                control,
                pool,
                inputs.decode,
                inputs.tool,
                record.timeline.request,
            )
            sampler.images = inputs.images
        rollouts = RolloutSource(
            config, mesh, control, sampler, publishing.update_engines, watchdog.alive
        )
        stack.callback(rollouts.close)
        rollouts.restore(state.ahead)
        stack.callback(
            publishing.close
        )  # else engines wait in the group for a trainer that has ended
        watchdog.waits += [rollouts.waiting, publishing.waiting]
        stack.enter_context(record.open(inputs, console))
        yield Run(
            config=config,
            actor=actor,
            state=state,
            num_steps=num_steps,
            inputs=inputs,
            source=rollouts,
            publishing=publishing,
            recording=record,
            checkpointer=_checkpointer(
                config, actor, rollouts, record, SaveSchedule(num_steps, state.step)
            ),
            watchdog=watchdog,
            alarm=MismatchAlarm(config, actor.arch.is_moe),
            stop_request=StopRequest(Path(path)) if (path := environment.get(STOP_FILE)) else None,
        )


def _checkpointer(
    config: ExperimentConfig,
    actor: MegatronActor,
    source: RolloutSource,
    recording: RunRecord,
    schedule: SaveSchedule,
) -> Checkpointer:
    asynchronous = config.checkpoint.asynchronous
    background = environment.num_trainer_nodes() > 1 if asynchronous == "auto" else asynchronous

    def gather_state(state: TrainState) -> TrainState:
        recording.flush()
        surplus, ahead = (
            gather_surplus(groups, actor.mesh) for groups in (state.surplus, source.finished())
        )
        return replace(state, surplus=surplus, ahead=ahead)

    return Checkpointer(
        config.checkpoint,
        recording.folder.checkpoints,
        run_identity(config, actor),
        lambda part, reshardable: save_actor(actor, part, reshardable, snapshot=background),
        gather_state,
        actor.mesh,
        replace(schedule, background=background),
    )


@contextmanager
def _console(
    config: ExperimentConfig, state: TrainState, num_steps: int, inputs: Inputs
) -> Iterator[StepConsole]:
    """Makes the console and prints the run's summary before the first sample."""
    with StepConsole(config.name, num_steps, state.step) as console:
        notes = [describe_dropped(config.data, inputs.prompts)]
        if config.eval is not None and inputs.eval_prompts is not None:
            notes.append(describe_dropped(config.eval.data, inputs.eval_prompts))
        if restarts := environment.get_int("TORCHELASTIC_RESTART_COUNT", 0):
            times = f"for the {restarts}. of {config.actor.max_restarts} times"
            notes.append(f"a rank was lost: all ranks started again, {times}")
        if state.step:
            notes.append(f"continues after step {state.step}")
        for note in filter(None, notes):
            console.note(note)
        yield console
