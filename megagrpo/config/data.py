"""The sections of the inputs: `model`, `data`, `eval`."""

from typing import Annotated

from pydantic import Field

from megagrpo.config.fields import (
    Fraction,
    LocalPath,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Rule,
    Section,
    Text,
    TopK,
    named,
    repeated,
)
from megagrpo.config.objective.own import OwnArguments


class ModelConfig(Section):
    """The model to train."""

    path: LocalPath
    """Folder with config.json, tokenizer and safetensors in Hugging Face's format, or a name on the
    Hub: `Qwen/Qwen3-1.7B`, `Qwen/Qwen3-1.7B@REVISION`."""
    tokenizer: LocalPath | None = None
    """Folder or name with the tokenizer. Default: `path`."""


class HeldOutConfig(Section):
    """Held-out prompts. Other keys, and those that you leave out, are as in `data`. All rows are
    read."""

    path: LocalPath | list[LocalPath] | None = None
    """As in `data`."""
    sources: "list[SourceConfig]" = Field(default=[])
    """As in `data`."""
    prompt_key: str | None = None
    """As in `data`."""
    answer_key: str | None = None
    """As in `data`."""


class CurriculumConfig(Section):
    """Choose rows by the results of earlier groups, instead of in passes over the data. See
    [curricula](../data-and-rewards.md#a-curriculum)."""

    name: str
    """`pools`, `drop_solved`, or your own `mine.py:weights`, which is called as f(rows, **args)."""
    args: OwnArguments = Field(default={})
    """Keyword arguments for your own function."""
    pass_reward: Number = 1.0
    """Reward from which a response passes."""
    hard_at_most: Fraction = 0.0
    """Highest pass rate of a row in the pool `hard`."""
    easy_at_least: Fraction = 1.0
    """Lowest pass rate of a row in the pool `easy`. Rows in between are in `medium`."""

    def problems(self) -> list[Rule]:
        hard, easy = self.hard_at_most, self.easy_at_least
        return [
            Rule(
                hard >= easy,
                f"hard_at_most {hard:g} is not below easy_at_least {easy:g}",
                "leave pass rates between them for the pool medium",
            )
        ]


class SourceConfig(Section):
    """One source of a mixture. Keys that you leave out are as in `data`."""

    source: Text
    """Name of the source in metrics and rollouts."""
    path: LocalPath | list[LocalPath]
    """As in `data`."""
    ratio: PositiveFloat | None = None
    """Share of the prompts, relative to other sources. Default, if no source has one: by size."""
    prompt_key: str | None = None
    """As in `data`."""
    answer_key: str | None = None
    """As in `data`."""
    grader: str | None = None
    """Grader for these rows, with the names that `grader_key` columns use."""
    grader_key: str | None = None
    """As in `data`."""
    extra_key: str | list[str] | None = None
    """As in `data`."""
    system_prompt: str | None = None
    """As in `data`."""
    prompt_template: str | None = None
    """As in `data`."""
    limit: PositiveInt | None = None
    """As in `data`."""


class DataConfig(Section):
    """Prompts and answers, one object per row. A key can lead into a row by dots:
    `reward_model.ground_truth`, `messages.-1.content`."""

    path: LocalPath | list[LocalPath] | None = None
    """One or several .jsonl, .json, .csv (also .gz) or .parquet files, a dataset on the Hub,
    `openai/gsm8k?config=main&split=train` (default split: train, or test for `eval.data`), or files
    in it, `hf://datasets/OWNER/NAME/FILE`."""
    sources: list[SourceConfig] = Field(default=[])
    """A mixture instead of `path`. Each source can have keys of its own."""
    prompt_key: str = "prompt"
    """Prompt column: a text, or chat messages with `chat_template`."""
    answer_key: str = "answer"
    """Answer column, which graders get."""
    source_key: str | None = None
    """Source column, for metrics by source and for `grader_by_source`."""
    grader_key: str | None = None
    """Column that names the grader: one in `reward.graders`, or any grader without args. Default:
    the grader in `reward`."""
    grader_by_source: dict[str, str] = Field(default={})
    """Grader for each value of `source_key`: `{openai/gsm8k: gsm8k, lighteval/MATH: math}`. `aime*`
    fits every other value that begins so."""
    extra_key: str | list[str] | None = None
    """Column for graders with a parameter `extra_info`, such as verl's compute_score, or several,
    for those that take columns by name, as TRL's."""
    images_key: str | None = None
    """Image column (paths, bytes or {bytes, path}) for prompts with images. The text has one
    `<image>` for each. Needs `chat_template`. See [vision](../vision.md)."""
    tools_key: str | None = None
    """Column with tools for the chat template, a list of {type, function} or its JSON. Needs
    `chat_template`."""
    teacher_key: str | None = None
    """Column that names a teacher in `teachers`, or several with weights, `{math: 0.7, code: 0.3}`.
    Empty: no teacher. Default: the only teacher."""
    weight_key: str | None = None
    """Column with weights for each loss component, `{rl: 0, cross_entropy: 1}`, which multiply
    those in `algorithm.streams`."""
    demonstration_key: str | None = None
    """Column with a response to learn, for streams that are written by data. Empty: none. It can
    have at most `sampling.max_response_tokens` tokens."""
    chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""
    chat_template_args: dict[str, str | int | float | bool] = Field(default={})
    """Arguments for the chat template, such as `enable_thinking: false` for Qwen3."""
    system_prompt: str | None = None
    """System message for prompts that have none. Needs `chat_template`."""
    prompt_template: str = "{prompt}"
    """Text around `{prompt}`, before the chat template. With messages, it goes around the last user
    message."""
    add_bos: bool = False
    """Begin prompts with the tokenizer's <bos>. Not with `chat_template`."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt. Longer ones are dropped and counted."""
    shuffle: bool = True
    """Use a new random order each epoch, instead of file order."""
    limit: PositiveInt | None = None
    """Rows to use, from the start of all files. Default: all."""
    curriculum: CurriculumConfig | None = None

    @property
    def parts(self) -> "list[DataPart]":
        """Each source with its keys over those of this section; the section itself if it has
        none."""
        return [
            self.reading(source, limit=source.limit or self.limit) for source in self.sources
        ] or [self.reading(self)]

    def reading(self, other: Section, **keys: object) -> "DataPart":
        """Returns the section with the files of another, and those of its keys that are given: a
        name and a grader of its own win over columns."""
        given = {key: value for key, value in other if value is not None and key != "ratio"}
        if "source" in given:
            given["source_key"] = None
        if "grader" in given:
            given |= {"grader_key": None, "grader_by_source": {}}
        return DataPart.model_construct(**{**dict(self), "sources": [], **given, **keys})

    @property
    def ratios(self) -> list[float]:
        """The ratios of the sources; [] if they are read as one."""
        return [source.ratio for source in self.sources if source.ratio]

    @property
    def paths(self) -> list[str]:
        """The files of all sources, in order."""
        paths_by_part = (
            [part.path] if isinstance(part.path, str) else part.path or [] for part in self.parts
        )
        return [path for paths in paths_by_part for path in paths]

    @property
    def name(self) -> str:
        """The files, as messages name them together."""
        return ", ".join(self.paths)

    def problems(self) -> list[Rule]:
        twice = repeated(self.paths)
        chat = self.chat_template
        names = [source.source for source in self.sources]
        same = repeated(names)
        with_ratio = len(self.ratios)
        return [
            Rule(
                not (self.path or names),
                "path names no file",
                "write path: prompts.jsonl, or several: [a.jsonl, b.jsonl]",
            ),
            Rule(
                self.path and names,
                "path and sources both name files",
                "write the file into a source of its own",
            ),
            Rule(twice, f"path names {named(map(repr, twice))} twice", "name each file once"),
            Rule(
                same,
                f"sources: {named(map(repr, same))} is there twice",
                "give each a name of its own",
            ),
            Rule(
                with_ratio not in (0, len(names)),
                f"sources: {with_ratio} of {len(names)} have a ratio",
                "write it for all or for none",
            ),
            Rule(
                any("{prompt}" not in part.prompt_template for part in self.parts),
                "prompt_template without {prompt}: every prompt would be the same",
                "write {prompt} where the row's prompt goes",
            ),
            Rule(
                self.add_bos and chat,
                "add_bos with chat_template: the template writes its own special tokens",
                "remove add_bos",
            ),
            *(
                Rule(
                    not chat and any(getattr(part, key) for part in self.parts),
                    f"{key} needs chat_template: true: nothing else reads it",
                    f"set it, or remove {key}",
                )
                for key in ("tools_key", "system_prompt", "chat_template_args", "images_key")
            ),
            Rule(
                self.grader_by_source and self.source_key is None,
                "grader_by_source needs source_key, the column that names a row's source (verl: data_source)",
                "set it, or remove grader_by_source",
            ),
            Rule(
                self.grader_by_source and self.grader_key,
                "grader_key and grader_by_source both choose a row's grader",
                "remove one",
            ),
            Rule(
                self.curriculum and not self.shuffle,
                "curriculum draws rows by chance, shuffle: false takes them in file order",
                "remove one",
            ),
        ]


class DataPart(DataConfig):
    """Rows of one source, with its name in metrics and its grader."""

    source: str | None = None
    grader: str | None = None


class EvalConfig(Section):
    """Held-out evaluation before the first step, every `every` steps, and after the last.
    `megagrpo evaluate` makes one without training."""

    data: HeldOutConfig
    every: PositiveInt = 10
    """Steps between evaluations."""
    before_first_step: bool = True
    """Also evaluate the model as it is, before the first step."""
    num_samples: PositiveInt = 1
    """Responses per prompt. Above 1, pass@k is reported too."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Sampling temperature. 0: greedy."""
    top_p: PositiveFraction = 1.0
    """As in `sampling`."""
    top_k: TopK = -1
    """As in `sampling`."""
    num_as_trained: NonNegativeInt = 0
    """Responses per prompt in a second evaluation, which samples as in training and writes metrics
    eval_as_trained/..."""
    max_response_tokens: PositiveInt | None = None
    """Longest response. Default: `sampling.max_response_tokens`."""
