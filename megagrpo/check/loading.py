"""Test-loads tokenizer and data as every trainer does, so that `megagrpo check` reports the same errors.

It imports transformers, and with it torch: some seconds. problems.py, which runs before every start, does not.
"""

from dataclasses import dataclass
from pathlib import Path

from megagrpo.check.problems import data_sections
from megagrpo.config.schema import DataConfig, ExperimentConfig
from megagrpo.data.prompts import load_prompts, load_tokenizer

_ANY_LENGTH = 2**31  # tokens; a first row that is too long is dropped by a run, and no problem


@dataclass(frozen=True)
class Trial:
    """Result of the loading test: problems, loaded, not tried."""

    problems: list[str]
    loaded: list[str]
    not_tried: list[str]


def try_loading(config: ExperimentConfig) -> Trial:
    """Loads the tokenizer, and renders and tokenises the first row of every data file that is already there."""
    trial = Trial([], [], ["the model's weights", "the engines"])
    folder = _tokenizer_folder(config)
    if folder is None:
        trial.not_tried.insert(0, f"tokenizer and chat template ({config.model.path} is not there yet)")
        return trial
    try:
        tokenizer = load_tokenizer(config.model.model_copy(update={"path": folder}))
    except ValueError as exc:
        trial.problems.append(str(exc))
        return trial
    trial.loaded.append(f"the tokenizer of {config.model.tokenizer or folder}")
    for data in data_sections(config):
        for path in data.paths:
            if Path(path).exists():
                _try_first_row(data.model_copy(update={"path": path}), tokenizer, trial)
            else:
                trial.not_tried.insert(0, f"{path} (not there yet)")
    return trial


def _tokenizer_folder(config: ExperimentConfig) -> str | None:
    """Returns the model's folder or, before the warm-up has written that, the folder it will be written like."""
    folders = [config.model.path, *([config.sft.model] if config.sft is not None else [])]
    return next((folder for folder in folders if (Path(folder) / "config.json").is_file()), None)


def _try_first_row(data: DataConfig, tokenizer, trial: Trial) -> None:
    first = data.model_copy(update={"limit": 1, "max_prompt_tokens": _ANY_LENGTH})
    try:
        prompts = load_prompts(first, tokenizer)
    except ValueError as exc:
        trial.problems.append(str(exc))
        return
    template = ", by the chat template" if data.chat_template else ""
    trial.loaded.append(f"the first row of {data.name}: {len(prompts.prompts[0].token_ids)} tokens{template}")
