"""Whether the tokenizers of two model folders give the same tokens the same ids. Loads no torch."""

import hashlib
import json
from pathlib import Path

_OTHER_FILES = ("vocab.*", "*.model", "tekken.json")  # of tokenizers without tokenizer.json


def different_tokens(folder: Path, of_model: Path) -> str:
    """Returns how the tokenizers of two folders differ, or "": their ids by token must be equal.
    Sizes of embeddings may differ, which are padded."""
    mine, theirs = _tokens(folder), _tokens(of_model)
    different = sorted(token for token, _ in mine.items() ^ theirs.items())
    if not different:
        return "" if mine else "has no tokenizer"
    return f"has another tokenizer than {of_model}, which differs in {different[0]!r}"


def _tokens(folder: Path) -> dict[str, int | str]:
    """Returns the id of every token; without tokenizer.json a digest of every file instead."""
    if found := token_ids(folder):
        return dict(found)
    files = [path for pattern in _OTHER_FILES for path in folder.glob(pattern)]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def token_ids(folder: Path) -> dict[str, int]:
    """Returns the id of every token in tokenizer.json; {} without that file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocab = tokenizer["model"].get("vocab", {})
    if isinstance(vocab, list):  # of token and score
        vocab = {token: number for number, (token, _) in enumerate(vocab)}
    return vocab | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
