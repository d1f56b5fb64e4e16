"""The sections of the inputs: `model`, `data`, `eval`."""

from pydantic import Field

from megagrpo.config.fields import NonNegativeFloat, NonNegativeInt, PositiveInt, Problems, Section


class ModelConfig(Section):
    """The model to train."""

    path: str = Field(description="Hugging Face folder with config.json, tokenizer files and safetensors.")
    tokenizer: str | None = None
    """Another Hugging Face folder with the tokenizer; default: `path`."""


class DataConfig(Section):
    """Prompts and answers, one object a row of one file or several."""

    path: str | list[str]
    """File that ends in .jsonl or .parquet, or a list of such files, which are read as one."""
    prompt_key: str = "prompt"
    """Column with the prompt: a text, or chat messages with `chat_template`."""
    answer_key: str = Field(default="answer", description="Column with the answer that the grader compares with.")
    grader_key: str | None = None
    """Column that names a grader for each row; default: `reward.grader`."""
    chat_template: bool = Field(default=False, description="Render prompts with the tokenizer's chat template.")
    chat_template_args: dict[str, str | int | float | bool] = Field(default={})
    """Arguments of the chat template, such as `enable_thinking: false` for Qwen3."""
    system_prompt: str | None = None
    """System message before every prompt; needs `chat_template`."""
    prompt_template: str = "{prompt}"
    """Text around `{prompt}`, applied before the chat template."""
    add_bos: bool = False
    """Begin prompts with the tokenizer's <bos>; not with `chat_template`."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt in tokens; longer ones are dropped and counted."""
    shuffle: bool = True
    """Draw the prompts in a new random order each epoch instead of file order."""
    limit: PositiveInt | None = None
    """Use only the first rows, this many over all files; default: all."""

    @property
    def paths(self) -> list[str]:
        """The files, in order."""
        return [self.path] if isinstance(self.path, str) else self.path

    @property
    def name(self) -> str:
        """The files, as messages name them together."""
        return ", ".join(self.paths)

    def problems(self) -> Problems:
        twice = sorted({path for path in self.paths if self.paths.count(path) > 1})
        templated, unread = "the template writes its own special tokens", "has no effect without chat_template: true"
        chat = self.chat_template
        return {
            "path names no file": not self.paths,
            f"path names {', '.join(map(repr, twice))} twice": twice,
            f"add_bos with chat_template: {templated}; remove add_bos": self.add_bos and chat,
            f"system_prompt {unread}": self.system_prompt and not chat,
            f"chat_template_args {unread}": self.chat_template_args and not chat,
        }


class EvalConfig(Section):
    """Held-out evaluation: before the first step, every `every` steps, and after the last."""

    data: DataConfig = Field(description="Held-out prompts; same keys as `data`.")
    every: PositiveInt = Field(default=10, description="Steps between evaluations.")
    num_samples: PositiveInt = 1
    """Responses a prompt; with more than 1, pass@k is reported too."""
    temperature: NonNegativeFloat = Field(default=0.0, description="Sampling temperature; 0 is greedy.")
    num_as_trained: NonNegativeInt = 0
    """Responses a prompt of a second evaluation, sampled at `sampling.temperature` as in training, with metrics
    eval_as_trained/...; 0: none."""
    max_response_tokens: PositiveInt | None = None
    """Longest response in tokens; default: `sampling.max_response_tokens`."""
