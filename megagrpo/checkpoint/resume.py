"""The start of a run: which checkpoint it continues from, and how the actor loads it."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.saving import load_actor
from megagrpo.checkpoint.changes import REFERENCE, prompt_order
from megagrpo.checkpoint.folder import (
    OTHER_DATA,
    checkpoint_folder,
    data_problem,
    description,
    put_in_place,
    step_of,
)
from megagrpo.checkpoint.groups import saved_groups, shared_groups
from megagrpo.checkpoint.identity import adapter_numbers, architecture_numbers
from megagrpo.checkpoint.save import RunIdentity, load
from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import Mesh
from megagrpo.system import environment
from megagrpo.types import RolloutGroup, TrainState
from megagrpo.weights.hf_folder import HfFolder

_SHOWN_S = 60.0  # other nodes see a shared file system seconds late
Rows = Sequence[Sequence[str | int]]  # PromptSet.rows; (): not compared


def run_identity(
    config: ExperimentConfig,
    actor: MegatronActor,
    rows: Rows = (),
    inputs: Mapping[str, object] | None = None,
) -> RunIdentity:
    """Collective. Returns the properties that a checkpoint must share with the run that loads
    it. rows, inputs: not compared if they are left out."""
    model: dict = {
        "model": architecture_numbers(actor.arch),
        "dtype": config.actor.dtype,
        "distributed_optimizer": config.actor.optimizer.distributed,
    }
    if actor.arch.vision is not None:
        # frozen parameters have no optimizer state
        model["trained_vision"] = config.actor.trained_vision
    if config.actor.has_draft:
        model["trained_draft"] = config.actor.trains_draft
    if config.actor.lora is not None:  # the checkpoint holds only adapters
        model["lora"] = adapter_numbers(config.actor.lora)
        model["base"] = _fingerprint(config, actor.mesh)
    return RunIdentity(model, config.actor.layout, rows, inputs or {})


def run_inputs(config: ExperimentConfig, mesh: Mesh) -> dict[str, object]:
    """Collective. Returns the inputs that a resumed run must share with its checkpoint."""
    inputs = prompt_order(config)
    if config.algorithm.uses_reference:
        inputs[REFERENCE] = _fingerprint(config, mesh)
    return inputs


def _fingerprint(config: ExperimentConfig, mesh: Mesh) -> str:
    return mesh.from_main(lambda: _fingerprint_of(config.model.path), "read the model's weights")


@lru_cache  # a page of each tensor
def _fingerprint_of(folder: str) -> str:
    return HfFolder(folder).fingerprint()


def load_checkpoint(
    source: Path, identity: RunIdentity, actor: MegatronActor, with_optimizer: bool = True
) -> TrainState:
    """Collective. Loads a checkpoint of this identity into the actor. Raises LeaderError if the
    model or the data differs. with_optimizer: else the weights only, in any layout."""
    return load(
        source,
        identity if with_optimizer else replace(identity, layout={}),
        lambda part: load_actor(actor, part, with_optimizer),
        actor.mesh,
    )


def find_checkpoint(config: ExperimentConfig, mesh: Mesh) -> Path | None:
    """Collective. Returns the run folder's latest checkpoint, else `checkpoint.load`, else None for
    the initial weights.

    Raises ValueError if `checkpoint.resume` is never and the run folder holds checkpoints of an
    earlier start, because a folder has one history. Raises LeaderError, before anything is removed,
    if the checkpoint that was saved last is missing.
    """
    options = config.checkpoint
    root = config.run_folder.checkpoints
    newest = mesh.from_main(
        lambda: put_in_place(root, options.dir), f"look for checkpoints in {root}"
    )
    if options.dir is not None:
        _refuse_other_disks(root, options.dir, mesh)
    again = environment.get_int("TORCHELASTIC_RESTART_COUNT", 0) or environment.get_int(
        "SLURM_RESTART_COUNT", 0
    )
    if newest is not None and options.resume == "never" and not again:
        raise ValueError(
            f"checkpoint.resume is never, but {newest} is there; name another output_dir"
        )
    if newest is None and options.load:
        return Path(options.load)
    return newest


def _refuse_other_disks(root: Path, directory: str, mesh: Mesh) -> None:
    """Collective. Raises ValueError on every rank unless all see what the main rank makes in the
    folder of checkpoints: else the first save would fail, and the steps before it be lost."""
    mark = Path(
        mesh.from_main(lambda: tempfile.mkdtemp(dir=root.absolute()), f"write into {directory}")
    )
    deadline = time.monotonic() + _SHOWN_S
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    shown = mesh.all_true(mark.exists())
    if mesh.is_main:
        mark.rmdir()
    if not shown:
        raise ValueError(
            f"checkpoint.dir: {directory} is not the same folder on all nodes: some do not see what "
            "rank 0 writes there; name one on a file system that they share"
        )


def resume(
    config: ExperimentConfig, source: Path | None, identity: RunIdentity, actor: MegatronActor
) -> TrainState:
    """Collective. Continues from find_checkpoint's choice, of a run of this identity.

    `checkpoint.load` loads another run's weights and optimizer, but not the steps, data cursor and
    statistics. Raises ValueError on every rank if the checkpoint holds more waiting groups than a
    step takes now.
    """
    if source is None:
        return TrainState()
    model = replace(identity, rows=(), inputs={})
    if source.parent != config.run_folder.checkpoints:
        load_checkpoint(source, model, actor)
        actor.updates_done = 0  # the learning-rate schedule starts with this run
        return TrainState()
    mesh = actor.mesh
    compared = identity
    if config.checkpoint.resume == OTHER_DATA:
        reference = {key: value for key, value in identity.inputs.items() if key == REFERENCE}
        compared = replace(model, inputs=reference)
    moved = config.algorithm.moved_reference(step_of(source))
    if moved and moved < step_of(source):
        folder = checkpoint_folder(source.parent, moved)
        if not mesh.from_main(folder.is_dir, f"look for {folder}"):
            raise ValueError(
                f"{folder}, whose weights are the reference, is not there: bring it back, or set "
                "algorithm.kl.reference_every to null, or to steps of which a checkpoint is there"
            )
        load_checkpoint(folder, model, actor, with_optimizer=False)
        actor.keep_reference()
    state = load_checkpoint(source, compared, actor)
    state.ahead, saved = waiting_groups(source, identity, mesh)
    if moved == state.step > 0:
        actor.keep_reference()
    if (
        (state.curriculum or saved)
        and compared is not identity
        and data_problem(source, identity.rows)
    ):
        # groups ahead are compared with their prompts later
        state.curriculum, saved = None, []
        if mesh.is_main:
            print("data.curriculum and dynamic sampling begin anew: the rows are others")
    # A surplus is one version old even without max_staleness.
    oldest = state.step - max(config.rollout.max_staleness, 1)
    young = [
        group
        for group in saved
        if config.algorithm.dynamic_sampling is not None
        and group.is_scored(*config.scoring)
        and group.is_of(oldest)
        and (group.greedy_outcome is not None or not config.algorithm.needs_greedy_response)
    ]
    state.surplus = shared_groups(young, mesh)
    counts = mesh.reduce(torch.tensor([len(state.surplus), len(saved)]), "sum")
    number, number_saved = counts.tolist()
    # A step takes at least one batch, or the surplus would get too old.
    num_prompts = config.train.num_prompts_per_step
    if number >= num_prompts:
        raise ValueError(
            f"checkpoint {source} has {number} groups for the next step, "
            f"train.num_prompts_per_step is {num_prompts}: take {number + 1} or more"
        )
    if number < number_saved and mesh.is_main:
        print(
            f"{number_saved - number} groups that were sampled for a later step are left "
            "out: their weights are older than rollout.max_staleness allows now, or teachers, "
            "graders, the advantage or dynamic sampling have changed"
        )
    return state


def waiting_groups(
    source: Path, identity: RunIdentity, mesh: Mesh
) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    """Returns the groups ahead, all of them if this layout is not the checkpoint's, else this
    leader's, and this leader's part of the surplus."""
    names = ("ahead", "surplus")
    own = description(source).get("layout") == identity.layout and not any(
        (source / f"{name}.npz").exists() for name in names
    )  # of all leaders, in older checkpoints
    ahead, surplus = (saved_groups(source, name, mesh, own) for name in names)
    return ahead, surplus if own else surplus[mesh.share(len(surplus))]
