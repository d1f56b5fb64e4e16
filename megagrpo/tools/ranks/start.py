"""What commands share that run as ranks: their start on this machine, the checkpoint or model that
they read."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.check.problems import refuse_layout
from megagrpo.check.rules.placement import needs_gpus
from megagrpo.checkpoint.folder import latest
from megagrpo.cluster.machine import ENDING, own_copy, trainer_gpus, trainer_variables
from megagrpo.cluster.supervise import ALONE, Launch, torchrun
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.folder import Model

if TYPE_CHECKING:  # it imports torch
    from megagrpo.mesh import Mesh


def train_ranks(config: ExperimentConfig, name: str, words: list[str]) -> int:
    """Runs a collective subcommand (sft, export) as `actor.world_size` ranks on this machine.

    words: the command's arguments after the experiment. Returns the exit status. Raises ValueError
    if the machine has GPUs, but fewer than ranks.
    """
    ranks, gpus = config.actor.world_size, len(trainer_gpus(config))
    if 0 < gpus < ranks:
        raise ValueError(
            f"`megagrpo {name}` runs on one machine: {gpus} GPU(s) are visible for {ranks} ranks "
            "(actor.world_size). Over several nodes start "
            f"`torchrun --nnodes N --nproc-per-node {gpus} ... -m megagrpo.cli {name} ...` on each"
        )
    files = f"{name}_{secrets.token_hex(4)}"  # another one may run in this folder
    with Launch(config.run_folder, name, end=ENDING, ranks=files) as launch:
        command = [name, own_copy(config, files), *words]
        # a process that hides GPUs before it forks cannot say why there are none
        options = [*torchrun(ranks, forks=not (gpus or needs_gpus(config))), *ALONE]
        env = trainer_variables(config, min(gpus, ranks))
        launch.status = launch.watch(launch.start_ranks(command, options, env))
    return launch.status


def require_finished(folder: Path) -> None:
    """Raises ValueError if the folder that `--checkpoint` names is no finished checkpoint."""
    if (folder / "config.json").is_file():
        raise ValueError(
            f"--checkpoint {folder} is a Hugging Face folder: give it as --set model.path={folder}"
        )
    if not (folder / "manifest.json").is_file():
        remedy = "give a folder of a run such as <output_dir>/checkpoints/step_000010"
        raise ValueError(
            f"--checkpoint {folder} is no finished checkpoint: it has no manifest.json; {remedy}"
        )


def latest_checkpoint(
    config: ExperimentConfig, mesh: Mesh, at_most: int | None = None
) -> Path | None:
    """Collective. Returns the finished checkpoint of the run folder with the highest step (up to
    `at_most`), or None.

    Only the main rank looks. Otherwise ranks could load parts of two checkpoints, since the run may
    go on, and other nodes see a shared file system seconds late.
    """
    root = config.run_folder.checkpoints
    return mesh.from_main(lambda: latest(root, at_most), f"look for checkpoints in {root}")


def model_to_warm_up(config: ExperimentConfig) -> Model:
    """Reads the model of section sft, which the layout can cut."""
    assert config.sft is not None
    model = Model.read(config.sft.model, config.model.tokenizer, config.actor.has_draft)
    # adapters are for the model that the warm-up writes
    refuse_layout(model.arch, config.actor.model_copy(update={"lora": None}))
    return model
