"""The start of a run: its actor, the model's weights, and the checkpoint it continues from."""

from collections.abc import Sequence
from pathlib import Path

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.saving import load_actor
from megagrpo.checkpoint import save as checkpoint
from megagrpo.checkpoint.folder import (
    OTHER_DATA,
    data_problem,
    latest,
    put_in_place,
)
from megagrpo.checkpoint.groups import deal_surplus
from megagrpo.checkpoint.identity import adapter_numbers, architecture_numbers
from megagrpo.checkpoint.save import RunIdentity
from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import Mesh
from megagrpo.system import environment
from megagrpo.types import TrainState
from megagrpo.weights.hf_folder import HfFolder

Rows = Sequence[Sequence[str | int]]  # PromptSet.rows; (): not compared


def run_identity(config: ExperimentConfig, actor: MegatronActor, rows: Rows = ()) -> RunIdentity:
    """Collective. Returns the properties that a checkpoint must share with the run that loads
    it."""
    model: dict = {
        "model": architecture_numbers(actor.arch),
        "dtype": config.actor.dtype,
        "distributed_optimizer": config.actor.optimizer.distributed,
    }
    if actor.arch.vision is not None:
        # what is frozen has no optimizer state
        model["trained_vision"] = config.actor.trained_vision
    if config.actor.lora is not None:  # the checkpoint holds only adapters
        model["lora"] = adapter_numbers(config.actor.lora)
        model["base"] = actor.mesh.from_main(
            HfFolder(config.model.path).fingerprint, "read the model's weights"
        )
    return RunIdentity(model, config.actor.layout, rows)


def load_checkpoint(
    config: ExperimentConfig,
    source: Path,
    actor: MegatronActor,
    rows: Rows = (),
    with_optimizer: bool = True,
) -> TrainState:
    """Collective. Loads a checkpoint of this experiment's model into the actor. LeaderError if the
    model or the data differs."""
    return checkpoint.load(
        source,
        run_identity(config, actor, rows),
        lambda part: load_actor(actor, part, with_optimizer),
        actor.mesh,
    )


def latest_checkpoint(
    config: ExperimentConfig, mesh: Mesh, at_most: int | None = None
) -> Path | None:
    """Collective. Returns the run's own finished checkpoint of the highest step (up to `at_most`),
    or None, as the main rank sees it.

    Ranks that looked for themselves could load parts of two: the run may go on, and other nodes see
    a shared file system seconds late.
    """
    root = config.run_folder.checkpoints
    return mesh.from_main(lambda: latest(root, at_most), f"look for checkpoints in {root}")


def find_checkpoint(config: ExperimentConfig, mesh: Mesh) -> Path | None:
    """Collective. Returns the run's own latest checkpoint, else `checkpoint.load`, else None: the
    initial weights.

    Raises ValueError if `checkpoint.resume` is never and the run folder holds checkpoints of an
    earlier start: a folder has one history. LeaderError, before anything is removed, if the newest
    one that was saved is not there.
    """
    options = config.checkpoint
    root = config.run_folder.checkpoints
    own = mesh.from_main(lambda: put_in_place(root, options.dir), f"look for checkpoints in {root}")
    again = environment.get_int("TORCHELASTIC_RESTART_COUNT", 0) or environment.get_int(
        "SLURM_RESTART_COUNT", 0
    )
    if own is not None and options.resume == "never" and not again:
        raise ValueError(f"checkpoint.resume is never, but {own} is there; name another output_dir")
    return own or (Path(options.load) if options.load else None)


def resume(
    config: ExperimentConfig, source: Path | None, actor: MegatronActor, rows: Rows
) -> TrainState:
    """Collective. Continues from find_checkpoint's choice.

    `checkpoint.load` loads another run's weights and optimizer, not its steps, data cursor or
    statistics. Raises ValueError on every rank if the checkpoint holds more waiting groups than a
    step takes now.
    """
    if source is None:
        return TrainState()
    own = source.parent == config.run_folder.checkpoints
    compared = rows if own and config.checkpoint.resume != OTHER_DATA else ()
    state = load_checkpoint(config, source, actor, compared)
    if not own:
        actor.updates_done = 0  # the learning-rate schedule is this run's
        return TrainState()
    if state.curriculum is not None and data_problem(source, rows):  # and resume is other_data
        state.curriculum = None
        if actor.mesh.is_main:
            print("data.curriculum begins anew: what it knows is of other rows", flush=True)
    # Without max_staleness too, a surplus is one version old.
    oldest = state.step - max(config.rollout.max_staleness, 1)
    young = [
        group for group in state.surplus if group.is_scored(*config.scoring) and group.is_of(oldest)
    ]
    # A step takes at least one batch: else the surplus would get too old.
    wanted = config.train.num_prompts_per_step
    if config.algorithm.dynamic_sampling is not None and len(young) >= wanted:
        raise ValueError(
            f"checkpoint {source} has {len(young)} groups for the next step, "
            f"train.num_prompts_per_step is {wanted}: take {len(young) + 1} or more"
        )
    if len(young) < len(state.surplus) and actor.mesh.is_main:
        print(
            f"{len(state.surplus) - len(young)} groups that were sampled for a later step are left "
            "out: their weights are older than rollout.max_staleness allows now, or teachers have "
            "changed",
            flush=True,
        )
    state.surplus = deal_surplus(young, actor.mesh)
    return state
