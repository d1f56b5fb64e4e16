"""What sft, export and replay lack, before any rank starts. Every function raises ValueError."""

from pathlib import Path

from megagrpo.check.problems import model_to_train, model_to_warm_up
from megagrpo.checkpoint.folder import latest
from megagrpo.config.schema import ExperimentConfig
from megagrpo.system.errors import translated


def refuse_sft(config: ExperimentConfig, file: str) -> None:
    """file: of the experiment."""
    if config.sft is None or config.sft_data is None:
        raise ValueError(f"{file} has no sft section, so there is no warm-up to run")
    with translated("sft.model", ValueError):
        model_to_warm_up(config)
    for path in config.sft_data.paths:
        if not Path(path).exists():
            raise ValueError(f"sft.path: {path} does not exist")


def refuse_export(config: ExperimentConfig, source: str | None, only_adapters: bool) -> None:
    """source: the checkpoint, if one is named."""
    if only_adapters and config.actor.lora is None:
        raise ValueError(
            "export --lora writes adapters, but the experiment has no actor.lora: "
            "all weights are trained"
        )
    root = config.run_folder.checkpoints
    if source is None and latest(root) is None:
        raise ValueError(f"{root} holds no finished checkpoint; name one with --checkpoint")
    if source is not None and not (Path(source) / "manifest.json").is_file():
        raise ValueError(f"--checkpoint {source}: no finished checkpoint is there")
    model_to_train(config)


def refuse_replay(config: ExperimentConfig, dump_folder: str) -> None:
    """Also a dump of another number of data-parallel ranks."""
    from megagrpo.monitor.dump import read_dump  # takes seconds

    dump = read_dump(Path(dump_folder))
    dp = config.actor.dp
    if dump.dp != dp:
        raise ValueError(f"{dump_folder} is of {dump.dp} data-parallel ranks, this layout has {dp}")
    model_to_train(config)
