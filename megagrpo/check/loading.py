"""Test-loads tokenizer and data as every trainer does, so that `megagrpo check` reports the same
errors.

It imports transformers, and with it torch: some seconds. problems.py, which runs before every
start, does not.
"""

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from megagrpo.config.fields import complaints
from megagrpo.config.schema import DataConfig, ExperimentConfig
from megagrpo.data.images import ImageStore
from megagrpo.data.prompts import load_prompts, load_tokenizer
from megagrpo.families.model import Model
from megagrpo.rollout.agents.make import make_answering

_SHOWN = 160  # characters of a text
_ROWS_WITH_IMAGES = 8  # tried of a file with a column of images; of others, the first
_ANY_LENGTH = 2**31  # tokens; a first row that is too long is dropped by a run, and no problem


@dataclass(frozen=True)
class LoadingTest:
    """Result of the loading test."""

    problems: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    first_row: list[str] = field(default_factory=list)  # as the model and the grader read it
    advice: list[str] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=lambda: ["the model's weights", "the engines"])


def try_loading(config: ExperimentConfig) -> LoadingTest:
    """Loads the tokenizer, and renders and tokenises the first row of every data file that is
    already there."""
    trial = LoadingTest()
    # before the warm-up has written the model's folder, the one that it will be written like
    folders = [config.model.path, *([config.sft.model] if config.sft is not None else [])]
    folder = next((folder for folder in folders if (Path(folder) / "config.json").is_file()), None)
    if folder is None:
        trial.not_tried.insert(
            0, f"tokenizer and chat template ({config.model.path} is not there yet)"
        )
    else:
        trial.problems.extend(complaints(_try_tokenizer, config, folder, trial))
    return trial


def _try_tokenizer(config: ExperimentConfig, folder: str, trial: LoadingTest) -> None:
    model = Model.read(folder, config.model.tokenizer)
    tokenizer = load_tokenizer(model)
    trial.loaded.append(f"the tokenizer of {config.model.tokenizer or folder}")
    if config.sampling.several_turns:
        trial.problems.extend(complaints(make_answering, config, tokenizer))
        player = "environment" if config.sampling.agent is None else "agent"
        trial.loaded.append(
            "the chat template, turn by turn" if config.data.chat_template else f"the {player}"
        )
    with TemporaryDirectory() as images:
        store = ImageStore.of(model, Path(images))
        for data in config.data_sections.values():
            for one_file in (
                part.model_copy(update={"path": path}) for part in data.parts for path in part.paths
            ):
                path = one_file.name
                if Path(path).exists():
                    trial.problems.extend(
                        complaints(_try_first_row, one_file, tokenizer, store, trial)
                    )
                else:
                    trial.not_tried.insert(0, f"{path} (not there yet)")


def _try_first_row(
    data: DataConfig, tokenizer, store: ImageStore | None, trial: LoadingTest
) -> None:
    rows = _ROWS_WITH_IMAGES if data.images_key is not None else 1
    prompts = load_prompts(
        data.model_copy(update={"limit": rows, "max_prompt_tokens": _ANY_LENGTH}), tokenizer, store
    )
    template = ", by the chat template" if data.chat_template else ""
    first = prompts.prompts[0]
    images = f" with {len(first.images)} image(s)" if first.images else ""
    trial.loaded.append(
        f"the first row of {data.name}: {len(first.token_ids)} tokens{images}{template}"
    )
    if not trial.first_row:
        trial.first_row.append(
            f"{first.location}, graded by {first.grader or 'the graders of reward'}:"
        )
        trial.first_row.append(f"  the model reads     {_short(first.text)}")
        trial.first_row.append(f"  the grader compares {_short(first.answer)}")
        if tokenizer.chat_template and not data.chat_template:
            trial.advice.append(
                "the tokenizer has a chat template; data.chat_template: true renders prompts by it"
            )


def _short(text: str) -> str:
    """Returns a text as one line of its start and its end."""
    text = repr(text)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
