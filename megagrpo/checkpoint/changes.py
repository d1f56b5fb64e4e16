"""Compares the settings and inputs of a resumed run with those of its checkpoint.

starts/step_000012.yaml has the settings of the start that continued after step 12. Of each setting
tests/unit/test_checkpoint_changes.py says whether it may change.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from megagrpo.checkpoint.folder import OTHER_DATA, description
from megagrpo.config.load import dump_config
from megagrpo.config.schema import ExperimentConfig

REFERENCE = "model.path"  # the input that is its files' fingerprint


def prompt_order(config: ExperimentConfig) -> dict[str, object]:
    """Returns the settings that fix the order of the prompts, as state.json has them."""
    data = config.data
    order: dict[str, object] = {"data.shuffle": data.shuffle, "data.sources.ratio": data.ratios}
    if data.shuffle:  # else no prompt's place depends on it
        order["seed"] = config.seed
    return order


def input_problem(folder: Path, inputs: Mapping[str, object]) -> str:
    """Returns why a run with these inputs cannot continue from a finished checkpoint, and what to
    do; "" if it can. An input that either of them lacks is not compared."""
    saved = description(folder).get("inputs", {})
    for key in sorted(saved.keys() & inputs.keys()):
        if saved[key] == inputs[key]:
            continue
        if key == REFERENCE:
            return (
                f"checkpoint {folder}: the files of model.path, the reference of the KL, are others "
                "than those of the steps before. Put them back, or begin a run with the new "
                f"reference: another output_dir, and checkpoint.load: {folder}"
            )
        return (
            f"checkpoint {folder}: {key} was {saved[key]} and is {inputs[key]} now, so that prompts "
            "would come in another order, some twice and others never. Put it back, or go on with "
            f"checkpoint.resume: {OTHER_DATA}"
        )
    return ""


def record_start(config: ExperimentConfig, step: int) -> list[str]:
    """Writes the settings of a start after `step` steps into the run folder. Returns a line for
    each that differs from the start before."""
    folder = config.run_folder.starts
    path = folder / f"step_{step:06d}.yaml"
    before = None
    for file in sorted(folder.glob("step_*.yaml")):
        if file < path:
            before = file
        else:  # its steps are made again
            file.unlink()
    dump_config(config, path)
    lines: list[str] = []
    if before is not None:
        with suppress(yaml.YAMLError):
            lines = changed_settings(_read(before), _read(path))
    return [f"{line} from step {step + 1}" for line in lines]


def changed_settings(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Returns "key: before -> now" for each setting that differs."""
    old, new = dict(leaves(before)), dict(leaves(now))
    return [
        f"{key}: {old.get(key, 'not set')} -> {new.get(key, 'not set')}"
        for key in new | old
        if old.get(key) != new.get(key)
    ]


def _read(path: Path) -> dict[str, object]:
    return yaml.safe_load(path.read_bytes())


def leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yields the values by dotted keys; those that are null or empty are not set."""
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = enumerate(value)
    elif value is not None:
        yield key, value
    for name, item in items:
        yield from leaves(item, f"{key}.{name}" if key else str(name))
