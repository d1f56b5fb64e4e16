"""Reads an experiment for a command: with its files from the Hub, judged by the rules and by the
libraries that it sets."""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from megagrpo.check.rules.table import broken_as_read
from megagrpo.config.fields import KeyPath
from megagrpo.config.load import Fetch, load_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.config.wording import dotted
from megagrpo.data.hub import with_local_files

# Commands that do not read `model`'s weights, and the section whose weights they read.
_WEIGHTS = {"check": "", "plan": "", "certify": "", "sft": "sft"}
_STARTING = ("run", "submit", "train")  # commands before which libraries judge their settings


def read_for(
    command: str,
    file: str,
    overrides: Sequence[str],
    in_rank: bool,
    dry_run: bool,
    later: Callable[[ExperimentConfig], Iterable[str]] | None,
) -> ExperimentConfig:
    """Reads the experiment and fetches files that it names on the Hub. Before a run, libraries
    check their own settings.

    in_rank: the process that started this rank has fetched and judged everything. dry_run: only
    notes files that it cannot fetch. later: see load_config; it asks the libraries itself. Raises
    ConfigError.
    """
    fetch: Fetch = partial(
        with_local_files, weights=_WEIGHTS.get(command, "model"), cached_only=in_rank
    )
    if dry_run:
        fetch = _described
    load = partial(load_config, file, overrides, judge=broken_as_read, fetch=fetch)
    if later is not None:
        return load(later=later)
    if command not in _STARTING or in_rank:
        return load()
    from megagrpo.check.libraries import library_problems

    return load(judge=lambda config: [*broken_as_read(config), *library_problems(config)])


def _described(config: ExperimentConfig) -> tuple[ExperimentConfig, list[tuple[KeyPath, str]]]:
    """Fetches what describes models and data, and prints what is out of reach."""
    config, absent = with_local_files(config, weights="")
    for keys, text in absent:
        print(f"megagrpo: {dotted(keys)}: not read: {text}", file=sys.stderr)
    return config, []
