"""Problems of `teachers`: their files, their tokenizers, and the rows that name them. Loads no
torch."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from megagrpo.check.engine_layout import engine_layout_problems
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.hub import is_hub_name
from megagrpo.data.rows import Row
from megagrpo.families.table import architecture_of, model_problems, read_description

_OTHER_FILES = ("vocab.*", "*.model", "tekken.json")  # of tokenizers without tokenizer.json


def teacher_problems(
    config: ExperimentConfig, tokenizer: Path, longest: int, largest_token_id: int | None
) -> Iterator[str]:
    """Yields what is wrong with the files of teachers and with the cut of their engines.

    tokenizer: folder of the trained model's. longest: tokens that a teacher scores.
    """
    for name, teacher in config.teachers.items():
        if teacher.path is None or is_hub_name(teacher.path):
            continue  # names on the Hub were judged as the experiment was read
        folder = Path(teacher.path)
        key = f"teachers.{name}.path: {folder}"
        if not (folder / "config.json").is_file():
            yield f"{key} holds no config.json, so it is no Hugging Face model folder"
            continue
        hf = read_description(folder / "config.json")
        if not model_problems(hf):  # else one of SGLang's models that no trainer has
            arch = architecture_of(hf)
            cuts = engine_layout_problems(config.of_teacher(name).rollout, arch)
            yield from (text.replace("rollout.", f"teachers.{name}.", 1) for text in cuts)
            if longest > arch.max_positions:
                yield f"{key} has {arch.max_positions} positions, and samples up to {longest} tokens"
        vocabulary = hf.get("vocab_size") or (hf.get("text_config") or {}).get("vocab_size")
        if vocabulary is not None and (largest_token_id or 0) >= vocabulary:
            yield (
                f"{key} has {vocabulary} embeddings (vocab_size), but {tokenizer} token id "
                f"{largest_token_id}"
            )
        if tokenizer.is_dir() and (problem := _other_tokens(folder, tokenizer)):
            yield f"{key} {problem}; distillation needs the same ids for the same tokens"


def _other_tokens(folder: Path, of_model: Path) -> str:
    """Returns how the tokenizers of two folders differ, or "": their ids by token must be equal.
    Sizes of embeddings may differ, which are padded."""
    mine, theirs = _tokens(folder), _tokens(of_model)
    different = sorted(token for token, _ in mine.items() ^ theirs.items())
    if not different:
        return "" if mine else "has no tokenizer"
    return f"has another tokenizer than {of_model}, which differs in {different[0]!r}"


def _tokens(folder: Path) -> dict[str, int | str]:
    """Returns the id of every token; without tokenizer.json a digest of every file instead."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        files = [path for pattern in _OTHER_FILES for path in folder.glob(pattern)]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocab = tokenizer["model"].get("vocab", {})
    if isinstance(vocab, list):  # of token and score
        vocab = {token: number for number, (token, _) in enumerate(vocab)}
    return vocab | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}


def unknown_teachers(config: ExperimentConfig, rows: Sequence[Row]) -> Iterator[str]:
    """Yields which rows name teachers that do not exist, or several that no loss mixes."""
    distillation = config.algorithm.distillation
    own_sets = distillation is not None and distillation.loss == "teacher_topk"
    for row in rows:
        names = [name for name, _ in row.teachers]
        for name in names:
            if name not in config.teachers:
                known = ", ".join(config.teachers)
                yield f"{row.location}: teacher {name!r} is not among teachers ({known})"
        if own_sets and len(names) > 1:
            yield (
                f"{row.location}: teachers {', '.join(names)} with distillation.loss teacher_topk: "
                "each has most probable tokens of its own; name one, or take student_topk"
            )
