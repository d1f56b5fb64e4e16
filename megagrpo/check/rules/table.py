"""The rules of the experiment alone, judged as its file is read; check/problems.py has the others."""

from collections.abc import Iterator

from megagrpo.check.rules import engines, objective, rewards, served_models, settings
from megagrpo.check.rules.subject import Subject
from megagrpo.config.fields import KeyPath
from megagrpo.config.schema import ExperimentConfig

AS_READ = (
    rewards.as_read,
    engines.as_read,
    objective.as_read,
    served_models.as_read,
    settings.as_read,
)


def broken_as_read(config: ExperimentConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yields (key of a value, or () if the text names keys, text) of each rule that an experiment
    breaks by itself."""
    for rules in AS_READ:
        yield from ((rule.key, rule.text) for rule in rules(Subject(config)) if rule.when)
