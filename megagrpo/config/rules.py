"""Generates the page of all rules: which settings do not go together, why, and what to write.

python -m megagrpo.config.rules > docs/reference/rules.md
"""

from collections.abc import Iterator

from megagrpo.config.actor import RouterLossConfig
from megagrpo.config.fields import Rule, Section
from megagrpo.config.objective.correction import Band, Rejection, TruncatedImportance
from megagrpo.config.rollout import AgentConfig, EnvironmentConfig
from megagrpo.config.schema import DataConfig, ExperimentConfig, ModelConfig

_HEAD = """\
# Rules

Which settings do not go together, why, and what to write instead. `megagrpo check CONFIG` and every other command
name all that an experiment breaks. This page is generated from the sections' `problems` and `excludes`
(`python -m megagrpo.config.rules > docs/reference/rules.md`), and a test compares the two. Values are those of the
defaults, where a message names the experiment's. What SGLang's and Megatron's own settings may not be is on the page of
[all keys](configuration.md).
"""
# of sections that are none by default
_OPTIONAL: dict[str, Section] = {
    "sampling.environment": EnvironmentConfig(function="m:f"),
    "sampling.agent": AgentConfig(function="m:f"),
    "actor.router_losses": RouterLossConfig(balance=1e-4),
    "algorithm.mismatch.weight, name: tis": TruncatedImportance(name="tis"),
    "algorithm.mismatch.weight, name: icepop or mis_mask": Band(name="icepop"),
    "algorithm.mismatch.reject": Rejection(high=2.0),
}


def page() -> str:
    """Returns docs/reference/rules.md."""
    example = _example()
    lines = [_HEAD]
    for path, rules in _tables(example):
        lines += [f"## `{path}`", ""]
        lines += ["| settings and reason | remedy |", "|---|---|"]
        lines += [f"| {_cell(rule.because)} | {_cell(rule.remedy)} |" for rule in rules]
        lines.append("")
    return "\n".join(lines)


def _example() -> ExperimentConfig:
    """Returns the experiment of all defaults."""
    data = DataConfig(path="prompts.jsonl")
    return ExperimentConfig(name="e", output_dir="runs/e", model=ModelConfig(path="m"), data=data)


def _tables(experiment: ExperimentConfig) -> Iterator[tuple[str, list[Rule]]]:
    """Yields the path of each section that has rules, with those of its own fields and then those
    with other sections."""
    examples = dict(_walk("", experiment))
    examples |= _OPTIONAL
    for path, section in examples.items():
        own = [] if section is experiment else section.problems()
        rules = [*own, *section.excludes(experiment)]
        if rules:
            yield path, rules


def _walk(path: str, section: Section) -> Iterator[tuple[str, Section]]:
    yield path, section
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _walk(f"{path}.{name}".lstrip("."), value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
