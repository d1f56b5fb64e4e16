"""Responses that come in pieces: server-sent events, and what they hold of a response so far."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import orjson

_DONE = b"[DONE]"


async def events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yields what each event of a stream holds, as JSON."""
    buffer = bytearray()
    async for data in content.iter_any():  # not by lines: theirs may be longer than aiohttp takes
        start = max(len(buffer) - 1, 0)  # an event that tells experts is of many pieces: none is looked at twice
        buffer += data
        while (end := buffer.find(b"\n\n", start)) >= 0:
            text = bytes(buffer[:end]).removeprefix(b"data:").strip()
            del buffer[: end + 2]
            start = 0
            if text and text != _DONE:
                yield orjson.loads(text)


class StreamedAnswer:
    """Collects the pieces of one response. version: the oldest that may sample its first token."""

    def __init__(self, version: int) -> None:
        self._pairs: list[list] = []  # [log-probability, token id, ...] of each token
        self._spans: list[tuple[int, str]] = []  # (token, version)
        self.version = str(version)  # of the engine at the end of the last piece
        self.ended = False  # the last token that came is the response's last

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Adds a piece, be it the new tokens or all so far. Returns the whole answer when it is the last one."""
        meta = chunk["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        new = meta["completion_tokens"] - len(self._pairs)
        if new > len(pairs):
            raise ValueError(f"a piece has {len(pairs)} tokens, and {new} are new")
        # A piece says the version at its end alone. Where that has changed the older one sampled some of it: a token
        # may be called older than it is, and never newer.
        if new > 0 and (not self._spans or self._spans[-1][1] != self.version):
            self._spans.append((len(self._pairs), self.version))
        self.version = meta["weight_version"]
        self._pairs += pairs[len(pairs) - new :] if new > 0 else []
        if meta.get("finish_reason") is None:
            return None
        self.ended = meta["finish_reason"]["type"] != "abort"
        if meta.get("weight_versions"):
            self._spans = [(span["start"], span["version"]) for span in meta["weight_versions"]]
        return chunk | {"meta_info": meta | {"output_token_logprobs": self._pairs}}

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids [T] int32 and log-probabilities [T] float32 that came."""
        ids = np.array([pair[1] for pair in self._pairs], np.int32)
        return ids, np.array([pair[0] for pair in self._pairs], np.float32)

    def spans(self) -> list[tuple[int, int]]:
        """Returns from which token on which version of the weights sampled; [] where a version is no number."""
        if not all(version.isdigit() for _, version in self._spans):
            return []
        return [(start, int(version)) for start, version in self._spans]

    def clear(self) -> None:
        """Forgets its tokens."""
        self._pairs, self._spans = [], []
