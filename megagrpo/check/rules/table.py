"""The rules of the experiment alone, which are judged as its file is read. Those with the model, files
and nodes are judged before a start: check/problems.py has their table."""

from collections.abc import Iterator

from megagrpo.check.rules.engines import format_rules, replay_rules, version_rules
from megagrpo.check.rules.objective import objective_rules, pass_rules, stream_rules
from megagrpo.check.rules.rewards import environment_rules, grader_rules
from megagrpo.check.rules.settings import setting_rules
from megagrpo.check.rules.subject import RulesOf, Subject
from megagrpo.check.rules.teachers import teacher_rules
from megagrpo.config.fields import KeyPath
from megagrpo.config.schema import ExperimentConfig

AS_READ: tuple[RulesOf, ...] = (
    environment_rules,
    format_rules,
    version_rules,
    pass_rules,
    objective_rules,
    grader_rules,
    replay_rules,
    stream_rules,
    teacher_rules,
    setting_rules,
)


def as_read(config: ExperimentConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yields (key of a value, or () if the text names keys, text) of each rule that an experiment
    breaks by itself."""
    for rules in AS_READ:
        yield from ((rule.key, rule.text) for rule in rules(Subject(config)) if rule.when)
