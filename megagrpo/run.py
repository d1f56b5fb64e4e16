"""Everything the loop holds: built once from the configuration, on every trainer rank, in an order that fails early."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from megagrpo import checkpoint, environment
from megagrpo.actor.megatron_actor import MegatronActor, NonFiniteUpdate
from megagrpo.actor.saving import load_actor, save_actor
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.prompts import PromptSet, describe_dropped, load_prompts, load_tokenizer
from megagrpo.mesh import LeaderError, Mesh, RunStopped
from megagrpo.monitor.console import StepConsole
from megagrpo.monitor.metrics import Metrics, StepLog
from megagrpo.monitor.watchdog import Watchdog
from megagrpo.replay import dump_folder, write_dump
from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout.control import find_service
from megagrpo.rollout.source import RolloutSource
from megagrpo.rollout.tools import make_tool
from megagrpo.selection import deal_surplus, gather_surplus, next_groups, rollout_metrics
from megagrpo.stop_request import STOP_FILE, StopRequest
from megagrpo.types import Batch, RolloutGroup, TrainState
from megagrpo.weights.actor_weights import load_initial_weights
from megagrpo.weights.exchange import Exchange


@dataclass
class Run:
    """One training run on this rank. `state.step` counts finished steps and is the version of the actor's weights."""

    config: ExperimentConfig
    run_dir: Path
    actor: MegatronActor
    prompts: PromptSet
    eval_prompts: PromptSet | None
    rollouts: RolloutSource
    exchange: Exchange
    state: TrainState
    stop_request: StopRequest
    watchdog: Watchdog
    saved_step: int = -1
    pending_save: checkpoint.PendingSave | None = None  # being written while training goes on
    step_log: StepLog | None = None  # the main rank's
    console: StepConsole | None = None

    @property
    def mesh(self) -> Mesh:
        return self.actor.mesh

    def publish(self) -> dict[str, float]:
        """Weights of version `state.step` into every engine; returns when each has proved them."""
        self.watchdog.enter("publish")
        seconds = self.exchange.publish(self.state.step)
        return {f"publish/{name}": value for name, value in seconds.items()}

    def next_groups(self, metrics: Metrics) -> list[RolloutGroup]:
        """This rank's share of the step's groups, sampled and scored. Where that cannot go on, the finished steps are saved first."""
        config, state, before = self.config, self.state, replace(self.state)
        try:
            groups = next_groups(self.rollouts, self.prompts, state, config, self.mesh, self._refresh, metrics)
            rollout_metrics(metrics, groups, self.mesh, config.train)
        except RunStopped as stopped:  # on every rank
            state.data_cursor, state.surplus = before.data_cursor, before.surplus
            self._save_before_the_end(stopped)
            raise
        return groups

    def _save_before_the_end(self, reason: RunStopped) -> None:
        try:
            self._begin_save()
            self._finish_save()
        except LeaderError as exc:
            raise RunStopped(
                f"{reason}\nand the state after step {self.state.step} could not be saved: {exc}"
            ) from reason

    def evaluation_groups(self) -> list[RolloutGroup]:
        config, sampling = self.config.eval, self.config.sampling
        self.watchdog.enter("evaluate")
        return self.rollouts.evaluate(
            self.eval_prompts.prompts,
            version=self.state.step,
            temperature=config.temperature,
            num_samples=config.num_samples,
            max_tokens=config.max_response_tokens or sampling.max_response_tokens,
            refresh=self._refresh,
        )

    def _refresh(self, engines: Sequence[str]) -> None:
        """An engine came back with other weights: give it the present ones. Called on every rank together."""
        self.exchange.publish(self.state.step, only=list(engines))

    def inspect_update(self, batch: Batch, algorithm: AlgorithmConfig, values: dict[str, float]) -> None:
        """Keep the step's batch when log.dump_steps asks for it or an update was not finite. Collective.

        Raises NonFiniteUpdate on every rank unless train.non_finite is skip.
        """
        step, bad = self.state.step + 1, values["optim/non_finite_updates"]
        if not bad and step not in self.config.log.dump_steps:
            return
        folder = dump_folder(self.run_dir, step)
        write_dump(folder, batch, algorithm, self.state.step, values, self.mesh)
        if not bad:
            return
        text = f"step {step}: loss or gradient of {bad:.0f} update(s) is not finite, these were not taken; the batch is in {folder}"
        if self.config.train.non_finite == "halt":
            raise NonFiniteUpdate(f"{text} (`megagrpo replay`). train.non_finite: skip would go on")
        if self.console is not None:
            self.console.note(text)

    def checkpoint(self) -> None:
        """Save when the schedule asks for it, and after the last step; finish a save in the background when it is written."""
        config, step = self.config.checkpoint, self.state.step
        if self.pending_save is not None and self.pending_save.ready():
            self._finish_save()
        last = step == self.config.train.num_steps
        if (config.every and step % config.every == 0) or last:
            self._begin_save()
        if last or not config.asynchronous:
            self._finish_save()

    def stopping(self) -> bool:
        """Whether any node was asked to stop (pre-emption, time limit); then the present state is saved. Collective."""
        if self.mesh.all_true(not self.stop_request.made()):
            return False
        self._begin_save()
        self._finish_save()
        self.stop_request.grant(self.state.step)
        if self.console is not None:
            self.console.note(f"stops after step {self.state.step}, as asked; the next start goes on from there")
        return True

    def _begin_save(self) -> None:
        if self.saved_step == self.state.step:
            return
        self._finish_save()  # one at a time: it holds a copy of the whole state
        config, identity = self.config.checkpoint, run_identity(self.config, self.actor)
        state = replace(self.state, surplus=gather_surplus(self.state.surplus, self.mesh))
        self.pending_save = checkpoint.begin(
            self.run_dir / "checkpoints",
            state,
            identity,
            config.keep,
            lambda f: save_actor(self.actor, f, config.asynchronous),
            self.mesh,
        )
        self.saved_step = self.state.step

    def _finish_save(self) -> None:
        if self.pending_save is not None:
            self.pending_save.finish()
            self.pending_save = None

    def log(self, values: dict[str, float], groups: Sequence[RolloutGroup] | None = None) -> None:
        """One entry of the run's record; every rank calls it, the main rank writes."""
        parts = self.mesh.gather_main(groups) if groups is not None and self.config.log.rollouts else []
        if self.mesh.is_main:
            self.step_log.write(self.state.step, values)
            if parts:
                self.step_log.write_rollouts(
                    self.state.step, sorted((g for part in parts for g in part), key=lambda g: g.group_id)
                )
            self.console.update(self.state.step, values)


def run_identity(config: ExperimentConfig, actor: MegatronActor) -> dict:
    """What must agree between a checkpoint and the run that loads it; the layout may differ."""
    return {
        "model": asdict(actor.arch),
        "dtype": config.actor.dtype,
        "distributed_optimizer": config.actor.optimizer.distributed,
    }


@contextmanager
def start_run(config: ExperimentConfig, service_url: str | None, device: torch.device) -> Iterator[Run]:
    """Build everything, on every rank; what needs no other process comes first, so that user errors end the run early."""
    run_dir = Path(config.output_dir)
    num_updates = config.train.num_steps * config.train.num_updates_per_step
    tokenizer = load_tokenizer(config.model)
    prompts = load_prompts(config.data, tokenizer)
    eval_prompts = load_prompts(config.eval.data, tokenizer) if config.eval else None
    tool = make_tool(config.sampling.tool, tokenizer) if config.sampling.tool else None
    actor = MegatronActor(
        model_path=config.model.path,
        config=config.actor,
        optimizer=config.actor.optimizer,
        num_updates=num_updates,
        seed=config.seed,
        device=device,
    )
    weights = load_initial_weights(actor, config.model.path)
    if config.algorithm.uses_reference:
        actor.keep_reference()  # the initial weights, also when the run resumes
    state = resume(config, run_dir, actor)
    mesh = actor.mesh
    with ExitStack() as stack:
        console = stack.enter_context(_console(config, state, prompts, eval_prompts)) if mesh.is_main else None
        control = find_service(run_dir, service_url, config.rollout.start_timeout_s)
        watchdog = stack.enter_context(Watchdog(config, mesh, run_dir / "logs", lambda: state.step))
        rewards = stack.enter_context(RewardPool(config.reward)) if mesh.is_leader else None

        def decode(token_ids: Sequence[int]) -> str:
            return tokenizer.decode(token_ids, skip_special_tokens=True)

        rollouts = RolloutSource(config, mesh, control, rewards, decode, tool, watchdog.alive)
        exchange = Exchange(config, mesh, weights, control, run_dir)
        stack.callback(exchange.close)  # the engines' end of the group must not wait for a trainer that is gone
        watchdog.waits += [rollouts.waiting, exchange.waiting]
        stop_request = StopRequest(environment.get(STOP_FILE))
        run = Run(
            config,
            run_dir,
            actor,
            prompts,
            eval_prompts,
            rollouts,
            exchange,
            state,
            stop_request,
            watchdog,
            saved_step=state.step,
        )
        if mesh.is_main:
            run.step_log = StepLog(run_dir, config.log, state.step)
            stack.callback(run.step_log.close)
            run.console = console
        yield run


@contextmanager
def _console(
    config: ExperimentConfig, state: TrainState, prompts: PromptSet, eval_prompts: PromptSet | None
) -> Iterator[StepConsole]:
    """What is known before anything is sampled is said at once."""
    with StepConsole(config.name, config.train.num_steps, state.step, config.log.console) as console:
        for data, found in ((config.data, prompts), (config.eval and config.eval.data, eval_prompts)):
            if found is not None and (dropped := describe_dropped(data, found)):
                console.note(dropped)
        if restarts := environment.get_int("TORCHELASTIC_RESTART_COUNT", 0):
            console.note(
                f"a rank was lost: all ranks started again, for the {restarts}. of {config.actor.max_restarts} times"
            )
        if state.step:
            console.note(f"continues after step {state.step}")
        yield console


def resume(config: ExperimentConfig, run_dir: Path, actor: MegatronActor) -> TrainState:
    """Continue from the run's own latest checkpoint, else from `checkpoint.load`, else from the initial weights.

    `load` brings weights and optimiser of another run; its steps, data and statistics stay that run's. Raises ValueError when
    `checkpoint.resume` is never where the run folder holds checkpoints of an earlier start: one history a folder.
    """
    options = config.checkpoint
    # the main rank's view: that of other nodes may be seconds older on a shared file system
    own = actor.mesh.gather_world(checkpoint.latest(run_dir / "checkpoints"))[0]
    again = environment.get_int("TORCHELASTIC_RESTART_COUNT", 0) or environment.get_int("SLURM_RESTART_COUNT", 0)
    if own is not None and options.resume == "never" and not again:
        raise ValueError(
            f"checkpoint.resume is never, but {own} is there; choose another output_dir, or move that folder away"
        )
    folder = own or (Path(options.load) if options.load else None)
    if folder is None:
        return TrainState()
    state = checkpoint.load(folder, run_identity(config, actor), lambda f: load_actor(actor, f), actor.mesh)
    if own is None:
        actor.updates_done = 0  # the learning-rate schedule is this run's
        return TrainState()
    state.surplus = deal_surplus(state.surplus, actor.mesh)
    return state
