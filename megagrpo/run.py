"""Holds all that the loop needs, built once from the configuration on every rank, in an order that fails early."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagrpo.actor.megatron_actor import MegatronActor, NonFiniteUpdate
from megagrpo.actor.saving import save_actor
from megagrpo.actor.step import holds_token_values
from megagrpo.batching.batch import build_batch
from megagrpo.checkpoint.resume import find_checkpoint, initial_weights, make_actor, resume, run_identity
from megagrpo.checkpoint.save import Checkpointer
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.prompts import PromptSet, describe_dropped, load_prompts, load_tokenizer
from megagrpo.mesh import LeaderError, Mesh, RunStopped
from megagrpo.monitor.console import StepConsole
from megagrpo.monitor.dump import write_dump
from megagrpo.monitor.metrics import Metrics
from megagrpo.monitor.record import StepLog
from megagrpo.monitor.rollouts import RolloutLog
from megagrpo.monitor.timeline import Timeline
from megagrpo.monitor.trained import TrainedLog
from megagrpo.monitor.wandb_log import WandbLog
from megagrpo.monitor.watchdog import Watchdog
from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout.control import ServiceControl, find_service
from megagrpo.rollout.selection import gather_surplus, grader_metrics, next_groups, rollout_metrics
from megagrpo.rollout.source import RolloutSource
from megagrpo.rollout.tools import make_tool
from megagrpo.system import environment
from megagrpo.system.run_folder import RunFolder
from megagrpo.system.stop_request import STOP_FILE, StopRequest
from megagrpo.types import Batch, RolloutGroup, TrainState, Updates
from megagrpo.weights.exchange import Exchange


@dataclass
class Run:
    """One training run on this rank. `state.step` counts finished steps and is the version of the actor's weights."""

    config: ExperimentConfig
    folder: RunFolder
    actor: MegatronActor
    prompts: PromptSet
    eval_prompts: PromptSet | None
    rollouts: RolloutSource
    exchange: Exchange
    control: ServiceControl
    state: TrainState
    num_steps: int  # after which it ends
    checkpointer: Checkpointer
    stop_request: StopRequest | None  # None where no launcher of ours started the ranks: nobody can ask them
    watchdog: Watchdog
    timeline: Timeline
    samples: RolloutLog | None = None  # of the one rank in a replica that samples
    trained: TrainedLog | None = None  # of the one rank in a replica that records what the update saw
    record: "MainRecord | None" = None  # the main rank's

    @property
    def mesh(self) -> Mesh:
        """The actor's ranks."""
        return self.actor.mesh

    def publish(self) -> dict[str, float]:
        """Brings weights of version `state.step` into every engine; returns seconds when each has proved them."""
        if self.config.weights.in_flight == "drain" and self.config.rollout.max_staleness:
            self.watchdog.enter("drain")
            self.rollouts.drain()
        self.watchdog.enter("publish")
        if self.config.rollout.colocate:
            self.actor.update_state.offload()
            self.mesh.from_main(self.control.let_start, "let engines start")
        seconds = self.exchange.publish(self.state.step)
        return {f"publish/{name}": value for name, value in seconds.items()}

    def next_groups(self, metrics: Metrics) -> list[RolloutGroup]:
        """Returns this rank's share of the step's groups, sampled and scored.

        Where that cannot go on, it saves the state of the finished steps before it raises RunStopped on every rank.
        """
        config, state = self.config, self.state
        try:
            steps_left = self.num_steps - state.step
            step = next_groups(
                self.rollouts, self.prompts, state, config, self.mesh, self._refresh, metrics, steps_left
            )
            grader_metrics(metrics, step.groups, config.reward)
            rollout_metrics(metrics, step.groups, self.mesh, config.train)
        except RunStopped as stopped:
            self._save_before_the_end(stopped)
            raise
        state.data_cursor, state.surplus, state.deferred = step.data_cursor, step.surplus, step.deferred
        self.rollouts.forget_taken()
        if config.rollout.colocate:  # the update's own state comes back when it is needed
            self.mesh.from_main(lambda: self.control.sleep(sleep_limit_s(config)), "put engines to sleep")
        return step.groups

    def _save_before_the_end(self, reason: RunStopped) -> None:
        try:
            self.checkpointer.save_now(self.state)
        except LeaderError as exc:
            raise RunStopped(
                f"{reason}\nand the state after step {self.state.step} could not be saved: {exc}"
            ) from reason

    def build_batch(self, groups: Sequence[RolloutGroup], updates: Updates) -> Batch:
        """Collective. Returns this rank's share of the step's samples, with how old they are where they may be."""
        trained_version = self.state.step if self.config.rollout.max_lag else None
        actor = self.actor
        layers = actor.routed_layers if self.config.actor.routing_replay == "rollout" else None
        return build_batch(groups, updates, self.mesh, actor.arch.attention_length, trained_version, layers)

    def evaluation_groups(self, temperature: float, num_samples: int) -> list[RolloutGroup]:
        """Returns this rank's share of the evaluation's groups of `num_samples` responses, sampled and scored."""
        config, sampling = self.config.eval, self.config.sampling
        assert config is not None and self.eval_prompts is not None, "asked for by a configuration with an eval section"
        self.watchdog.enter("evaluate")
        return self.rollouts.evaluate(
            self.eval_prompts.prompts,
            version=self.state.step,
            temperature=temperature,
            num_samples=num_samples,
            max_tokens=config.max_response_tokens or sampling.max_response_tokens,
            refresh=self._refresh,
        )

    def _refresh(self, engines: Sequence[str]) -> None:
        """Collective. Gives the present weights to engines that came back with others."""
        self.exchange.publish(self.state.step, only=list(engines))

    def inspect_update(
        self, batch: Batch, algorithm: AlgorithmConfig, values: dict[str, float], logprobs: Tensor
    ) -> None:
        """Collective. Dumps the step's batch if log.dump_steps has the step or an update was not finite.

        Records the trained samples with the trainer's log-probabilities [T]. Raises NonFiniteUpdate on every rank
        unless train.non_finite is skip.
        """
        step, bad = self.state.step + 1, values["optim/non_finite_updates"]
        if self.trained is not None:
            self.trained.write(step, batch, logprobs)
        if not bad and step not in self.config.log.dump_steps:
            return
        folder = self.folder.dump(step)
        write_dump(folder, batch, algorithm, self.state.step, values, self.mesh, self.actor.routed_layers)
        if not bad:
            return
        which = f"step {step}: loss or gradient of {bad:.0f} update(s) is not finite"
        text = f"{which}, these were not taken; the batch is in {folder}"
        if self.config.train.non_finite == "halt":
            raise NonFiniteUpdate(f"{text} (`megagrpo replay`). train.non_finite: skip would go on")
        if self.record is not None:
            self.record.console.note(text)

    def close_logs(self) -> None:
        """Waits until what this rank records in the background is on disk."""
        for log in (self.samples, self.trained):
            if log is not None:
                log.close()

    def checkpoint(self) -> None:
        """Collective. Saves when the schedule asks for it, and after the last step."""
        self.checkpointer.on_schedule(self.state)

    def stopping(self) -> bool:
        """Collective. Whether any node was asked to stop (pre-emption, time limit); then the present state is saved."""
        if not any(self.mesh.gather_world(self.stop_request is not None and self.stop_request.made())):
            return False
        self.checkpointer.save_now(self.state)
        if self.stop_request is not None:
            self.stop_request.grant(self.state.step)
        if self.record is not None:
            step = self.state.step
            self.record.console.note(f"stops after step {step}, as asked; the next start goes on from there")
        return True

    def log(self, values: dict[str, float], groups: Sequence[RolloutGroup] | None = None) -> None:
        """Adds one entry to the run's record: the main rank's metrics, and of every replica the groups it sampled."""
        if self.samples is not None and groups is not None:
            self.samples.write(self.state.step, groups)
        if self.record is not None:
            self.record.step_log.write(self.state.step, values)
            self.record.wandb_log.write(self.state.step, values)
            self.record.console.update(self.state.step, values)
        self.timeline.end_step(self.state.step)


@dataclass(frozen=True)
class MainRecord:
    """Where the main rank writes what all ranks measured."""

    step_log: StepLog
    wandb_log: WandbLog
    console: StepConsole


def sleep_limit_s(config: ExperimentConfig) -> float:
    """Returns the seconds in which all engines fall asleep: one may be starting, and one may not answer."""
    return config.rollout.start_timeout_s + config.rollout.patience_s(cuda=True)


@contextmanager
def start_run(config: ExperimentConfig, service_url: str | None, device: torch.device) -> Iterator[Run]:
    """Collective. Builds everything; what needs no other process comes first, so that user errors end the run early."""
    folder = RunFolder(Path(config.output_dir))
    if config.rollout.colocate:  # every rank before it takes memory of a GPU that an engine has
        find_service(folder.path, service_url, config.rollout.start_timeout_s).sleep(sleep_limit_s(config))
    tokenizer = load_tokenizer(config.model)
    prompts = load_prompts(config.data, tokenizer)
    eval_prompts = load_prompts(config.eval.data, tokenizer) if config.eval else None
    tool = make_tool(config.sampling.tool, tokenizer) if config.sampling.tool else None
    num_steps = config.train.steps(len(prompts))
    actor = make_actor(config, num_steps, device)
    mesh = actor.mesh
    source = find_checkpoint(config, folder, mesh)
    weights = initial_weights(config, config.algorithm, source, actor)
    state = resume(config, folder, source, actor)
    with ExitStack() as stack:
        console = (
            stack.enter_context(_console(config, state, num_steps, prompts, eval_prompts)) if mesh.is_main else None
        )
        control = find_service(folder.path, service_url, config.rollout.start_timeout_s)
        timeline = Timeline(folder, mesh.rank, mesh.world_size, state.step, config.log.timeline)
        stack.callback(timeline.close)
        watchdog = stack.enter_context(Watchdog(config, mesh, folder, lambda: state.step, timeline.mark))
        rewards = stack.enter_context(RewardPool(config.reward)) if mesh.is_leader else None
        decode = _decoder(tokenizer)
        rollouts = RolloutSource(
            config, mesh, control, rewards, decode, tool=tool, alive=watchdog.alive, on_request=timeline.request
        )
        stack.callback(rollouts.close)
        rollouts.hold(state.ahead)
        exchange = Exchange(config, mesh, weights, control, folder.path, timeline.call)
        stack.callback(exchange.close)  # the engines' end of the group must not wait for a trainer that is gone
        watchdog.waits += [rollouts.waiting, exchange.waiting]
        stop_file = environment.get(STOP_FILE)
        samples = _rollout_log(config, folder, mesh, state.step)
        run = Run(
            config=config,
            folder=folder,
            actor=actor,
            prompts=prompts,
            eval_prompts=eval_prompts,
            rollouts=rollouts,
            exchange=exchange,
            control=control,
            state=state,
            num_steps=num_steps,
            checkpointer=_checkpointer(
                config, folder, actor, state.step, num_steps, partial(_state_of_all, mesh, rollouts, samples)
            ),
            stop_request=StopRequest(Path(stop_file)) if stop_file else None,
            watchdog=watchdog,
            timeline=timeline,
            samples=samples,
            trained=_trained_log(config, folder, mesh, tokenizer, state.step),
        )
        stack.callback(run.close_logs)
        if console is not None:
            run.record = stack.enter_context(_main_record(config, folder, console, state.step))
        yield run


@contextmanager
def _main_record(
    config: ExperimentConfig, folder: RunFolder, console: StepConsole, start_step: int
) -> Iterator[MainRecord]:
    with (
        closing(StepLog(folder, config.log, start_step)) as step_log,
        WandbLog(config, folder, start_step, console.note) as wandb_log,
    ):
        yield MainRecord(step_log, wandb_log, console)


def _trained_log(
    config: ExperimentConfig, folder: RunFolder, mesh: Mesh, tokenizer: Any, start_step: int
) -> TrainedLog | None:
    if not config.log.rollouts or not holds_token_values():
        return None

    def pieces(token_ids: Sequence[int]) -> list[str]:
        return [str(tokenizer.decode([token])) for token in token_ids]

    return TrainedLog(folder, mesh.dp_rank, mesh.dp_size, config.log.tokens, pieces, start_step)


def _rollout_log(config: ExperimentConfig, folder: RunFolder, mesh: Mesh, start_step: int) -> RolloutLog | None:
    if not config.log.rollouts or not mesh.is_leader:
        return None
    return RolloutLog(folder, mesh.dp_rank, mesh.dp_size, start_step)


def _decoder(tokenizer: Any) -> Callable[[np.ndarray], str]:
    def decode(token_ids: np.ndarray) -> str:
        return str(tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    return decode


def _state_of_all(mesh: Mesh, rollouts: RolloutSource, samples: RolloutLog | None, state: TrainState) -> TrainState:
    """Collective. Returns, on the main rank, the state with what other ranks hold of it, for a checkpoint."""
    if samples is not None:
        samples.flush()  # what a checkpoint has behind it is on disk: no other start will sample it again
    surplus, ahead = gather_surplus(state.surplus, mesh), gather_surplus(rollouts.finished(), mesh)
    return replace(state, surplus=surplus, ahead=ahead)


def _checkpointer(
    config: ExperimentConfig,
    folder: RunFolder,
    actor: MegatronActor,
    saved_step: int,
    num_steps: int,
    gather_state: Callable[[TrainState], TrainState],
) -> Checkpointer:
    wish, several_nodes = config.checkpoint.asynchronous, environment.num_trainer_nodes() > 1
    background = several_nodes if wish == "auto" else wish
    return Checkpointer(
        config.checkpoint,
        folder.checkpoints,
        run_identity(config, actor),
        lambda part, reshardable: save_actor(actor, part, reshardable, snapshot=background),
        gather_state,
        actor.mesh,
        num_steps=num_steps,
        saved_step=saved_step,
        background=background,
    )


@contextmanager
def _console(
    config: ExperimentConfig, state: TrainState, num_steps: int, prompts: PromptSet, eval_prompts: PromptSet | None
) -> Iterator[StepConsole]:
    """Makes the console and shows at once what is known before anything is sampled."""
    with StepConsole(config.name, num_steps, state.step, config.log.console) as console:
        notes = [describe_dropped(config.data, prompts)]
        if config.eval is not None and eval_prompts is not None:
            notes.append(describe_dropped(config.eval.data, eval_prompts))
        if restarts := environment.get_int("TORCHELASTIC_RESTART_COUNT", 0):
            of = config.actor.max_restarts
            notes.append(f"a rank was lost: all ranks started again, for the {restarts}. of {of} times")
        if state.step:
            notes.append(f"continues after step {state.step}")
        for note in filter(None, notes):
            console.note(note)
        yield console
