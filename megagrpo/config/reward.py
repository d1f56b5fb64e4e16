"""The `reward` section. Graders with many options have their own section here."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

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
)
from megagrpo.system.errors import translated

if TYPE_CHECKING:
    from megagrpo.config.schema import ExperimentConfig

Scalar = str | int | float | bool
GraderArgs = dict[str, Scalar | dict[str, Scalar]]


class CodeOptions(Section):
    """Runs the response's Python program against the answer's test cases; see
    [rewards](../data-and-rewards.md)."""

    score: Literal["fraction", "all"] = "fraction"
    """Fraction of the tests that pass, or 1 if all do, else 0."""
    test_s: Seconds = 3.0
    """Seconds for one test; then it has failed."""
    total_s: Seconds = 8.0
    """Seconds for all tests of a response; those left then have failed."""
    memory_mb: Annotated[int, Field(ge=64, le=MOST)] = 512
    """MiB: address space of each process, resident memory of all of a program's together."""
    output_kb: PositiveInt = 1024
    """KiB that a program may write to standard output."""
    disk_mb: PositiveInt = 16
    """MiB of files that a program may write."""
    open_files: Annotated[int, Field(ge=8, le=MOST)] = 64
    """Files that one process may have open."""
    processes: PositiveInt = 8
    """Processes and threads of one program."""
    tolerance: NonNegativeFloat = 0.0
    """Largest absolute or relative difference of numbers that are equal."""
    isolation: Literal["required", "off"] = "required"
    """Namespaces of a program's own, without which nothing starts; off: limits only, and network
    and readable files stay in reach."""


class ServiceOptions(Section):
    """Fields that all graders over HTTP share."""

    url: str
    """URL of the POST requests; without user name or password."""
    timeout_s: Seconds = 60.0
    """Seconds for one request with its retries; then the outcome is a timeout."""
    retries: NonNegativeInt = 4
    """Further attempts after a lost connection, a status 429 or a status of 500 and above."""
    concurrency: PositiveInt = 16
    """Requests in flight at once, of each leader."""
    api_key_env: str | None = None
    """Environment variable of the trainers with the key, sent as a bearer token."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        if "@" in url.partition("?")[0]:  # not shown: it may be a secret
            raise ValueError(
                "url holds a user name or password; name a variable in api_key_env instead"
            )
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url {url!r} should look like http://host:port/path")
        return url


class HttpOptions(ServiceOptions):
    """Asks a reward service for the scores of batches of responses; see
    [rewards](../data-and-rewards.md)."""

    batch_size: PositiveInt = 32
    """Most responses in one request."""
    batch_wait_s: NonNegativeFloat = 0.05
    """Seconds that a response waits for others to share its request."""


class JudgeOptions(ServiceOptions):
    """Asks a model behind an OpenAI endpoint, .../v1/chat/completions; see
    [rewards](../data-and-rewards.md)."""

    model: str
    """Name of the model, as the endpoint knows it."""
    prompt_file: str
    """File with the judge's prompt: {prompt}, {response} and {answer} are put in."""
    system: str | None = None
    """System message before it; default: none."""
    pattern: str = (
        r"(?i)(?<!max )(?<!maximum )\bscore[\s*_)\]]*[:：][\s*_(\[]*"
        r"([-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?)"
    )
    """Regular expression whose last match in the judge's reply holds the score in its first
    group."""
    scores: dict[str, Number | int] = Field(default={})
    """Words of the first group and their scores, such as {yes: 1, no: 0}; default: a number."""
    temperature: NonNegativeFloat = 0.0
    """The judge's sampling temperature."""
    max_tokens: PositiveInt = 1024
    """Longest reply of the judge in tokens."""
    body: dict[str, Scalar] = Field(default={})
    """Further fields of the request, such as {top_p: 0.9}."""

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


OPTIONS: dict[str, type[Section]] = {
    "code": CodeOptions,
    "http": HttpOptions,
    "judge": JudgeOptions,
}


class GraderConfig(Section):
    """One of several graders, and what its score counts."""

    grader: str
    """As `reward.grader`."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9_]*$")] = ""
    """Its name in metrics, rollouts and `data.grader_key`; default: that of the grader."""
    weight: Number = 1.0
    """Factor of its score in the reward, which is the sum."""
    args: GraderArgs = Field(default={})
    """Keyword arguments of the grader."""

    @property
    def short_name(self) -> str:
        """`name`, or what follows the grader's module, as metrics can spell it."""
        return self.name or re.sub(r"[^a-z0-9_]", "_", self.grader.rpartition(":")[2].lower())

    def problems(self) -> list[Rule]:
        check_options(self.grader, self.args)
        return []


class RewardConfig(Section):
    """How responses are graded: by one grader (`grader`, `args`), or by several (`graders`)."""

    grader: str = "gsm8k"
    """`exact`, `format`, `gsm8k`, `math`, `math_dapo`, `code`, `http`, `judge`, or your own as
    "package.module:function"."""
    args: GraderArgs = Field(default={})
    """Keyword arguments of the grader."""
    graders: list[GraderConfig] = Field(default=[])
    """Several graders instead of one: the reward is the weighted sum of their scores."""
    group_grader: str | None = None
    """Makes the rewards of a whole group from its scores: `rank`, `distinct`, or your own as
    "package.module:function"; default: none."""
    group_args: dict[str, Scalar] = Field(default={})
    """Keyword arguments of the group grader."""
    workers: Processes = 2
    """Grader processes of each rank that samples."""
    timeout_s: Seconds = 10.0
    """Seconds for one response in a grader process; then its outcome is a timeout, which is never
    learned from. `http` and `judge` have their own."""
    shuffle: bool = False
    """Control experiment: permute the rewards over the step's samples, so that they say nothing."""

    @property
    def entries(self) -> Sequence[GraderConfig]:
        """The graders, at least one."""
        return self.graders or [GraderConfig(grader=self.grader, args=self.args)]

    @property
    def has_parts(self) -> bool:
        """Returns whether a reward is made of scores that are worth a record of their own."""
        return bool(self.graders) or self.group_grader is not None

    def problems(self) -> list[Rule]:
        check_options(self.grader, self.args)
        names = [entry.short_name for entry in self.entries]
        twice = sorted({name for name in names if names.count(name) > 1})
        is_set = self.args or self.grader != type(self).model_fields["grader"].default
        limits = [
            CodeOptions.model_validate(entry.args).total_s
            for entry in self.entries
            if entry.grader == "code"
        ]
        total_s = max(limits, default=0.0)
        return [
            Rule(
                self.graders and is_set,
                "grader and graders are both set",
                "write one of them, and each grader's args with it",
            ),
            Rule(
                twice,
                f"graders: two are named {named(twice)}",
                "give each a name of its own",
            ),
            Rule(
                self.group_args and self.group_grader is None,
                "group_args without group_grader",
                "set group_grader, or remove group_args",
            ),
            Rule(
                total_s >= self.timeout_s,
                f"timeout_s {self.timeout_s:g} must be some seconds above grader code's total_s {total_s:g}; "
                "else a slow program is the grader's failure, not a wrong answer",
                "raise the former, or lower the latter",
            ),
        ]

    def excludes(self, experiment: "ExperimentConfig") -> list[Rule]:
        advantage = experiment.algorithm.advantage
        return [
            Rule(
                self.group_grader and advantage.needs_greedy_response,
                f"reward.group_grader with advantage {advantage.name}: its greedy baseline "
                "has no group, and cannot be compared with rewards that depend on the group",
                "remove the group grader, or take another estimator",
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
            f"{'.'.join(map(str, error['loc']))}: {error['msg']}"
            for error in exc.errors(include_url=False)
        ]
        raise ValueError(
            f"args of grader {grader}: {'; '.join(problems)} (its options: {known})"
        ) from exc
