"""The smallest experiment, Python programs in processes of their own, and waiting."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from megagrpo.check.rules import engine_layout, placement, settings
from megagrpo.check.rules.subject import Nodes, Subject, broken
from megagrpo.check.rules.table import broken_as_read
from megagrpo.config.actor import ActorConfig
from megagrpo.config.fields import KeyPath
from megagrpo.config.load import load_config
from megagrpo.config.rollout import RolloutConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.architecture import Architecture
from megagrpo.system.environment import child_environment

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
T = TypeVar("T")


def experiment(**sections) -> ExperimentConfig:
    """Required keys have values that fit no file; `sections` are added. ValueError with the rules that it breaks."""
    required = {"name": "t", "output_dir": "t", "model": {"path": "m"}, "data": {"path": "d"}}
    return judged(ExperimentConfig.model_validate(required | sections))


def judged(config: ExperimentConfig) -> ExperimentConfig:
    """The experiment; ValueError with the rules that it breaks, but those of libraries' settings."""
    if wrong := [text for keys, text in broken_as_read(config) if not keys]:
        raise ValueError("\n".join(wrong))
    return config


def read_experiment(path: str | Path, overrides: Sequence[str] = (), **options) -> ExperimentConfig:
    """An experiment as commands read it. options: of load_config."""
    judge = options.pop("judge", lambda config: ())
    both = lambda config: [*broken_as_read(config), *judge(config)]  # noqa: E731
    return load_config(path, overrides, judge=both, **options)


def engine_layout_problems(rollout: RolloutConfig, arch: Architecture) -> list[str]:
    """Why an engine's ranks cannot cut the model."""
    config = experiment().model_copy(update={"rollout": rollout})
    return broken(engine_layout.before_start(Subject(config, arch=arch)))


def placement_problems(config: ExperimentConfig, nodes: Nodes | None = None) -> list[str]:
    """Why the ranks have no place on the nodes."""
    return broken(placement.before_start(Subject(config, nodes or Nodes())))


def setting_problems(actor: ActorConfig, rollout: RolloutConfig) -> list[tuple[KeyPath, str]]:
    """The settings of libraries that are refused."""
    config = experiment().model_copy(update={"actor": actor, "rollout": rollout})
    return [(rule.key, rule.text) for rule in settings.as_read(Subject(config)) if rule.when]


def python(*words: str | Path, env: Mapping[str, str] | None = None, **options) -> str:
    """What Python prints with these words; it must end without an error. options: of subprocess.run."""
    command = [sys.executable, "-W", "ignore", *map(str, words)]
    env = child_environment() if env is None else env
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.strip()


def live_children() -> set[psutil.Process]:
    """The processes that this one has started and that run. A test before may have made it a
    subreaper, which keeps zombies of others' children."""
    found = psutil.Process().children(recursive=True)
    return {child for child in found if child.status() != psutil.STATUS_ZOMBIE}


def until(ready: Callable[[], T], within_s: float = 15.0, said: Callable[[], object] = str, poll_s: float = 0.02) -> T:
    """The first true value of ready(); after that time AssertionError with what `said` returns."""
    deadline = time.monotonic() + within_s
    while not (value := ready()):
        assert time.monotonic() < deadline, said()
        time.sleep(poll_s)
    return value


def documented_metrics() -> set[str]:
    """The names in the first column of docs/reference/metrics.md; * stands for a name or a number."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return {row for cell in cells for row in re.findall(r"`([a-z_]+/[a-z_0-9*]+)`", cell)}


def metric_patterns() -> list[re.Pattern[str]]:
    """What these names match."""
    return [re.compile(re.escape(row).replace(r"\*", r"[a-z_0-9{}]+")) for row in documented_metrics()]
