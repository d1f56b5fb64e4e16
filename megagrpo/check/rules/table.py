"""All rules, by the moment at which they are judged."""

from collections.abc import Callable, Iterable, Iterator

from megagrpo.check.rules.engine_layout import engine_layout_rules
from megagrpo.check.rules.engines import (
    format_rules,
    model_in_engine_rules,
    replay_rules,
    version_rules,
)
from megagrpo.check.rules.inputs import (
    checkpoint_rules,
    file_rules,
    function_rules,
    model_rules,
    row_rules,
)
from megagrpo.check.rules.lengths import length_rules, sparse_rules, token_rules
from megagrpo.check.rules.objective import objective_rules, pass_rules, stream_rules
from megagrpo.check.rules.placement import placement_rules
from megagrpo.check.rules.rewards import environment_rules, grader_rules
from megagrpo.check.rules.settings import setting_rules
from megagrpo.check.rules.subject import Subject
from megagrpo.check.rules.teachers import teacher_model_rules, teacher_rules
from megagrpo.check.rules.trainer_layout import trainer_layout_rules
from megagrpo.config.fields import KeyPath, Rule
from megagrpo.config.schema import ExperimentConfig

# of the experiment alone: as its file is read
AS_READ: tuple[Callable[[Subject], Iterable[Rule]], ...] = (
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
# with the model's config.json: before anything starts, as the next ones
OF_MODEL: tuple[Callable[[Subject], Iterable[Rule]], ...] = (
    model_rules,
    trainer_layout_rules,
    engine_layout_rules,
    model_in_engine_rules,
    length_rules,
    sparse_rules,
    token_rules,
)
# with files and nodes
OF_START: tuple[Callable[[Subject], Iterable[Rule]], ...] = (
    file_rules,
    row_rules,
    function_rules,
    checkpoint_rules,
    placement_rules,
    teacher_model_rules,
)


def as_read(config: ExperimentConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yields (key of a value, or () if the text names keys, text) of each rule that an experiment
    breaks by itself."""
    for rules in AS_READ:
        yield from ((rule.key, rule.text) for rule in rules(Subject(config)) if rule.when)
