"""The sections of the inputs: `model`, `data`, `eval`."""

from typing import Self

from pydantic import Field, model_validator

from megagrpo.config.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class ModelConfig(Section):
    """The model to train."""

    path: str = Field(description="Hugging Face folder with config.json, tokenizer files and safetensors.")
    tokenizer: str | None = Field(
        default=None, description="Another Hugging Face folder with the tokenizer; default: `path`."
    )


class DataConfig(Section):
    """Prompts and answers, one object a row of one file or several."""

    path: str | list[str] = Field(
        description="File that ends in .jsonl or .parquet, or a list of such files, which are read as one."
    )
    prompt_key: str = Field(
        default="prompt", description="Column with the prompt: a text, or chat messages with `chat_template`."
    )
    answer_key: str = Field(default="answer", description="Column with the answer that the grader compares with.")
    grader_key: str | None = Field(
        default=None, description="Column that names a grader for each row; default: `reward.grader`."
    )
    chat_template: bool = Field(default=False, description="Render prompts with the tokenizer's chat template.")
    chat_template_args: dict[str, str | int | float | bool] = Field(
        default={}, description="Arguments of the chat template, such as `enable_thinking: false` for Qwen3."
    )
    system_prompt: str | None = Field(
        default=None, description="System message before every prompt; needs `chat_template`."
    )
    prompt_template: str = Field(
        default="{prompt}", description="Text around `{prompt}`, applied before the chat template."
    )
    add_bos: bool = Field(
        default=False, description="Begin prompts with the tokenizer's <bos>; not with `chat_template`."
    )
    max_prompt_tokens: PositiveInt = Field(
        default=1024, description="Longest prompt in tokens; longer ones are dropped and counted."
    )
    shuffle: bool = Field(
        default=True, description="Draw the prompts in a new random order each epoch instead of file order."
    )
    limit: PositiveInt | None = Field(
        default=None, description="Use only the first rows, this many over all files; default: all."
    )

    @property
    def paths(self) -> list[str]:
        """The files, in order."""
        return [self.path] if isinstance(self.path, str) else self.path

    @property
    def name(self) -> str:
        """The files, as messages name them together."""
        return ", ".join(self.paths)

    @model_validator(mode="after")
    def _some_files(self) -> Self:
        twice = sorted({path for path in self.paths if self.paths.count(path) > 1})
        if not self.paths or twice:
            raise ValueError(f"path names {twice[0]!r} twice" if twice else "path names no file")
        return self

    @model_validator(mode="after")
    def _one_source_of_special_tokens(self) -> Self:
        if self.add_bos and self.chat_template:
            raise ValueError("add_bos with chat_template: the template writes its own special tokens; remove add_bos")
        for key, value in (("system_prompt", self.system_prompt), ("chat_template_args", self.chat_template_args)):
            if value and not self.chat_template:
                raise ValueError(f"{key} has no effect without chat_template: true")
        return self


class EvalConfig(Section):
    """Held-out evaluation: before the first step, every `every` steps, and after the last."""

    data: DataConfig = Field(description="Held-out prompts; same keys as `data`.")
    every: PositiveInt = Field(default=10, description="Steps between evaluations.")
    num_samples: PositiveInt = Field(
        default=1, description="Responses a prompt; with more than 1, pass@k is reported too."
    )
    temperature: NonNegativeFloat = Field(default=0.0, description="Sampling temperature; 0 is greedy.")
    num_as_trained: NonNegativeInt = Field(
        default=0,
        description="Responses a prompt of a second evaluation, sampled at `sampling.temperature` as in training, with "
        "metrics eval_as_trained/...; 0: none.",
    )
    max_response_tokens: PositiveInt | None = Field(
        default=None, description="Longest response in tokens; default: `sampling.max_response_tokens`."
    )
