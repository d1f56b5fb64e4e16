"""Reads an experiment's file and judges it by all rules that need nothing else."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megagrpo.check.rules.table import as_read
from megagrpo.config.fields import KeyPath
from megagrpo.config.load import Fetch, load_config
from megagrpo.config.schema import ExperimentConfig

Judge = Callable[[ExperimentConfig], Iterable[tuple[KeyPath, str]]]


def read_experiment(
    path: str | Path,
    overrides: Sequence[str] = (),
    judge: Judge = lambda config: (),
    later: Callable[[ExperimentConfig], Iterable[str]] = lambda config: (),
    fetch: Fetch = lambda config: (config, []),
) -> ExperimentConfig:
    """Reads an experiment file as load_config does, and judges it by check/rules, too. judge: what
    else judges it. Raises ConfigError with every problem."""
    both: Judge = lambda config: (*as_read(config), *judge(config))  # noqa: E731
    return load_config(path, overrides, both, later, fetch)
