"""Whether the tokenizers of two model folders give the same tokens the same ids. Loads no torch."""

import hashlib
from pathlib import Path

from megagrpo.models.table import read_description

_OTHER_FILES = ("vocab.*", "*.model", "tekken.json")  # of tokenizers without tokenizer.json


def different_tokens(folder: Path, model_folder: Path) -> str:
    """Returns how the tokenizers of two folders differ, or "" if their ids by token are equal.
    Embeddings may differ in size, because they are padded."""
    mine, theirs = _tokens(folder), _tokens(model_folder)
    if not mine and not theirs:
        return "has no tokenizer"
    different = sorted(token for token, _ in mine.items() ^ theirs.items())
    if not different:
        return ""
    return f"has another tokenizer than {model_folder}, which differs in {different[0]!r}"


def _tokens(folder: Path) -> dict[str, int | str]:
    """Returns the id of every token; without tokenizer.json a digest of every file instead."""
    files = [path for pattern in _OTHER_FILES for path in folder.glob(pattern)]
    return {**token_ids(folder)} or {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def token_ids(folder: Path) -> dict[str, int]:
    """Returns the id of every token in tokenizer.json; {} without that file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    tokenizer = read_description(file)
    vocab = tokenizer["model"].get("vocab", {})
    if isinstance(vocab, list):  # of token and score
        vocab = {token: number for number, (token, _) in enumerate(vocab)}
    return vocab | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
