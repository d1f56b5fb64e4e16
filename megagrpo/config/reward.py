"""The `reward` section. Graders with many options have their own section here."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator

from megagrpo.config.fields import (
    MOST,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveInt,
    Processes,
    Rule,
    Seconds,
    Section,
    named,
    repeated,
)
from megagrpo.config.objective.served_models import ServedModel, Url
from megagrpo.system.errors import translated

Scalar = str | int | float | bool
GraderArgs = dict[str, Scalar | dict[str, Scalar]]


class CodeOptions(Section):
    """Run the Python program in the response against the test cases in the answer. See
    [rewards](../data-and-rewards.md)."""

    score: Literal["fraction", "all"] = "fraction"
    """Use the fraction of tests passed, or 1 if all pass, else 0."""
    test_s: Seconds = 3.0
    """Time limit per test, after which the test has failed."""
    total_s: Seconds = 8.0
    """Time limit for all tests of a response. Tests that are left have failed."""
    memory_mb: Annotated[int, Field(ge=64, le=MOST)] = 512
    """Limit on the address space per process, and on the resident memory of all processes in a
    program together."""
    output_kb: PositiveInt = 1024
    """Limit on standard output per program."""
    disk_mb: PositiveInt = 16
    """Limit on files that a program writes."""
    open_files: Annotated[int, Field(ge=8, le=MOST)] = 64
    """Open files per process."""
    processes: PositiveInt = 8
    """Processes and threads per program."""
    tolerance: NonNegativeFloat = 1e-6
    """Largest absolute difference between equal numbers. It is relative to an expected number with
    a point or an exponent."""
    isolation: Literal["required", "off"] = "required"
    """Run in namespaces, or not at all. off: only limits, and the program can reach the network and
    readable files."""


class ServiceOptions(Section):
    """Fields that all HTTP graders share."""

    timeout_s: Seconds = 60.0
    """Time limit per request with its retries. Beyond it the outcome is a timeout."""
    retries: NonNegativeInt = 4
    """Retries after a lost connection, a status 429, or a status of 500 and above."""
    concurrency: PositiveInt = 16
    """Requests in flight per leader."""
    api_key_env: str | None = None
    """Environment variable on the trainers that holds the key, a bearer token."""


class HttpOptions(ServiceOptions):
    """Ask a reward service to score responses in batches. See [rewards](../data-and-rewards.md)."""

    url: Url
    """URL for the POST requests, without user name or password."""
    batch_size: PositiveInt = 32
    """Most responses per request."""
    batch_wait_s: NonNegativeFloat = 0.05
    """Longest time that a response waits for others to share its request."""


class JudgeOptions(ServedModel, ServiceOptions):
    """Ask a model: engines that this run starts for `path`, or an OpenAI endpoint at `url`,
    .../v1/chat/completions. See [rewards](../data-and-rewards.md)."""

    model: str | None = None
    """Model name at the endpoint of `url`."""
    prompt_file: str
    """File with the judge's prompt. {prompt} (the conversation), {response} and {answer} are filled
    in."""
    system: str | None = None
    """System message before the prompt."""
    pattern: str = (
        r"(?i)(?<!max )(?<!maximum )\bscore[\s*_)\]\"']*[:：][\s*_(\[\"']*"
        r"([-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?)"
    )
    """Regular expression. The first group in its last match in the reply is the score."""
    scores: dict[str, Number | int] = Field(default={})
    """Scores for words in that group, such as {yes: 1, no: 0}. Default: a number."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of the judge."""
    max_tokens: PositiveInt = 1024
    """Longest reply."""
    body: dict[str, Scalar] = Field(default={})
    """More fields for the request, such as {top_p: 0.9}."""

    @field_validator("pattern")
    @classmethod
    def _has_a_group(cls, pattern: str) -> str:
        with translated(f"pattern {pattern!r} is not a regular expression", re.error):
            groups = re.compile(pattern).groups
        if groups < 1:
            raise ValueError(
                f"pattern {pattern!r} has no group; write the score's part in parentheses"
            )
        return pattern

    def problems(self) -> list[Rule]:
        remote = self.model_fields_set & {"model", *ServiceOptions.model_fields} - {"api_key_env"}
        return [
            *super().problems(),
            Rule(
                self.path and remote,
                f"{named(sorted(remote))} with path: requests to the run's engines have the limits "
                "of `rollout`",
                "remove it, or write a url",
            ),
            Rule(
                self.url and self.model is None,
                "url without model",
                "write the name that the model has there",
            ),
        ]


OPTIONS: dict[str, type[Section]] = {
    "code": CodeOptions,
    "http": HttpOptions,
    "judge": JudgeOptions,
}


class GraderConfig(Section):
    """One of several graders."""

    grader: str
    """As `reward.grader`."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9_]*$")] = ""
    """Name in metrics, rollouts and `data.grader_key`. Default: the grader's name."""
    weight: Number = 1.0
    """Factor for this score in the reward, which is a sum."""
    args: GraderArgs = Field(default={})
    """Keyword arguments for the grader."""

    @property
    def short_name(self) -> str:
        """`name`, or what follows the grader's module, as metrics can spell it."""
        return self.name or re.sub(r"[^a-z0-9_]", "_", self.grader.rpartition(":")[2].lower())

    def problems(self) -> list[Rule]:
        check_options(self.grader, self.args)
        return []


class RewardConfig(Section):
    """Grade responses with one grader (`grader`, `args`) or several (`graders`)."""

    grader: str = "gsm8k"
    """`exact`, `format`, `gsm8k`, `math`, `math_dapo`, `code`, `http`, `judge`, or yours,
    "package.module:function"."""
    args: GraderArgs = Field(default={})
    """Keyword arguments for the grader."""
    graders: list[GraderConfig] = Field(default=[])
    """Several graders instead. The reward is the weighted sum of their scores."""
    group_grader: str | None = None
    """Turn the scores in a group into rewards: `rank`, `distinct`, or yours,
    "package.module:function"."""
    group_args: dict[str, Scalar] = Field(default={})
    """Keyword arguments for `group_grader`."""
    workers: Processes = 2
    """Grader processes per sampling rank."""
    timeout_s: Seconds = 10.0
    """Time limit per response in a grader process. A timeout is not trained on. `http` and `judge`
    have their own limit."""
    shuffle: bool = False
    """Control experiment: permute rewards over the samples in a step."""

    @property
    def entries(self) -> Sequence[GraderConfig]:
        """The graders, at least one."""
        return self.graders or [GraderConfig(grader=self.grader, args=self.args)]

    @property
    def judges(self) -> dict[str, JudgeOptions]:
        """The judges by name, without those whose options are refused."""
        found = {}
        with suppress(ValidationError):  # which the grader says itself
            for entry in self.entries:
                if entry.grader == "judge":
                    found[entry.short_name] = JudgeOptions.model_validate(entry.args)
        return found

    def first_judge(self, name: str) -> str:
        """Returns the first judge with the path of this one, whose engines both ask."""
        judges = self.judges
        return next(other for other in judges if judges[other].path == judges[name].path)

    @property
    def has_parts(self) -> bool:
        """Returns whether a reward is made of scores that are worth a record of their own."""
        return bool(self.graders) or self.group_grader is not None

    def problems(self) -> list[Rule]:
        check_options(self.grader, self.args)
        twice = repeated(entry.short_name for entry in self.entries)
        other = [
            name
            for name, judge in self.judges.items()
            if judge.path
            and judge.model_fields_set & set(judge.sizes)
            and self.first_judge(name) != name
        ]
        total_s = 0.0
        for entry in self.entries:
            if entry.grader == "code":
                with suppress(ValidationError):  # which the entry says itself
                    total_s = max(total_s, CodeOptions.model_validate(entry.args).total_s)
        return [
            Rule(
                self.graders
                and (self.args or self.grader != type(self).model_fields["grader"].default),
                "grader and graders are both set",
                "write one of them, and each grader's args with it",
            ),
            Rule(twice, f"graders: two are named {named(twice)}", "give each a name of its own"),
            Rule(
                other,
                f"graders: {named(other)} asks the engines of the first judge with its path",
                "remove its num_engines, tp, ep and nodes_per_engine",
            ),
            Rule(
                self.group_args and self.group_grader is None,
                "group_args without group_grader",
                "set group_grader, or remove group_args",
            ),
            Rule(
                total_s >= self.timeout_s,
                f"timeout_s {self.timeout_s:g} must be some seconds above grader code's total_s {total_s:g}; "
                "else slow programs are grader failures, not wrong answers",
                "raise the former, or lower the latter",
            ),
        ]


def check_options(grader: str, args: GraderArgs) -> None:
    """Raises ValueError if `args` are not the options of a grader that has a section of them."""
    if grader not in OPTIONS:
        return
    try:
        OPTIONS[grader].model_validate(args)
    except ValidationError as exc:
        known = ", ".join(OPTIONS[grader].model_fields)
        problems = [
            ": ".join([*map(str, error["loc"]), error["msg"].removeprefix("Value error, ")])
            for error in exc.errors(include_url=False)
        ]
        raise ValueError(
            f"args of grader {grader}: {'; '.join(problems)} (its options: {known})"
        ) from exc
