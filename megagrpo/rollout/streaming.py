"""Streamed responses: server-sent events, and the tokens of a response so far."""

from collections.abc import AsyncIterator
from typing import NotRequired, TypedDict

import aiohttp
import numpy as np
import orjson

_DONE = b"[DONE]"
UNVERIFIED = -1  # the version of weights that no trainer has verified, older than every other


class VersionSpan(TypedDict):
    """The weights that sampled the tokens from `start` on."""

    start: int
    version: str


class Meta(TypedDict):
    """The fields of SGLang's meta_info that are read here."""

    completion_tokens: int
    weight_version: str
    finish_reason: dict[str, str] | None  # "type": "stop", "length" or "abort"
    output_token_logprobs: NotRequired[list[tuple[float, int, None]]]
    weight_versions: NotRequired[list[VersionSpan]]
    routed_experts: NotRequired[str]
    image_tokens: NotRequired[int]
    cached_tokens: NotRequired[int]  # of the prompt
    spec_correct_drafts_histogram: NotRequired[
        list[int]
    ]  # forwards by the number of a draft's tokens they accepted


class StreamError(TypedDict):
    """An error sent instead of a piece."""

    code: NotRequired[int]
    message: NotRequired[str]


class Answer(TypedDict):
    """An answer of /generate, whole or a piece of it."""

    meta_info: Meta
    prompt_token_ids: NotRequired[list[int]]
    error: NotRequired[StreamError]


async def events(content: aiohttp.StreamReader) -> AsyncIterator[Answer]:
    """Yields the JSON of each event of a stream."""
    buffer = bytearray()
    async for data in content.iter_any():  # not by lines: they may be longer than aiohttp's limit
        start = max(
            len(buffer) - 1, 0
        )  # an event with experts spans many reads: no byte is searched twice
        buffer += data
        while (end := buffer.find(b"\n\n", start)) >= 0:
            text = bytes(buffer[:end]).removeprefix(b"data:").strip()
            del buffer[: end + 2]
            start = 0
            if text and text != _DONE:
                yield orjson.loads(text)


def version_number(text: str) -> int:
    """Returns an engine's weight version; UNVERIFIED if it is no number, as for the weights that
    SGLang loads."""
    return int(text) if text.isdigit() else UNVERIFIED


class StreamedAnswer:
    """Collects the pieces of one response. version: the oldest that may sample its first token."""

    def __init__(self, version: int) -> None:
        self._pairs: list[
            tuple[float, int, None]
        ] = []  # (log-probability, token id, ...) of each token
        self.spans: list[
            tuple[int, int]
        ] = []  # (token, version): which weights sampled from which token on
        self.version = version  # of the engine at the end of the last piece
        self.ended = False  # the last token so far is the response's last

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, chunk: Answer) -> Answer | None:
        """Adds a piece, which holds the new tokens or all so far. Returns the whole answer after
        the last piece."""
        meta = chunk["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        new = meta["completion_tokens"] - len(self._pairs)
        if new > len(pairs):
            raise ValueError(f"a piece has {len(pairs)} tokens, and {new} are new")
        # A piece has only the version at its end. If that has changed, the older weights sampled a
        # part of it: a token may be labelled older than it is, never newer.
        if new > 0 and (not self.spans or self.spans[-1][1] != self.version):
            self.spans.append((len(self._pairs), self.version))
        self.version = version_number(meta["weight_version"])
        self._pairs += pairs[len(pairs) - new :] if new > 0 else []
        if (reason := meta.get("finish_reason")) is None:
            return None
        self.ended = reason["type"] != "abort"
        if spans := meta.get("weight_versions"):
            self.spans = [(span["start"], version_number(span["version"])) for span in spans]
        whole: Meta = {**meta, "output_token_logprobs": self._pairs}
        return {**chunk, "meta_info": whole}

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids [T] int32 and log-probabilities [T] float32 so far."""
        ids = np.array([pair[1] for pair in self._pairs], np.int32)
        return ids, np.array([pair[0] for pair in self._pairs], np.float32)

    def clear(self) -> None:
        """Drops its tokens."""
        self._pairs, self.spans = [], []
