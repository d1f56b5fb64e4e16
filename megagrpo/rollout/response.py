"""A response as an engine sends it, how turns are joined, and the use of prefix caches.

Loads without an HTTP client.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, ClassVar, NotRequired, TypedDict

import msgspec
import numpy as np

from megagrpo.types import WithArrays

if TYPE_CHECKING:  # it pulls in torch
    from megagrpo.monitor.metrics import Metrics


@dataclass(frozen=True, eq=False)
class Response(WithArrays):
    """Holds T token ids as sampled, the one that ended the response included."""

    _types: ClassVar[dict[str, type]] = {
        "token_ids": np.int32,
        "logprobs": np.float32,
        "top_ids": np.int32,
    }

    token_ids: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32, the engine's, of each token, in nats, after temperature
    finish_reason: str  # "stop" | "length"
    weight_version: int  # of the weights that sampled its first token
    newer: tuple[tuple[int, int], ...] = ()  # as in Sample
    # [tokens, layers with experts, k], from the requested token on
    routed_experts: np.ndarray | None = None
    num_cached: int = 0  # tokens before it that the engine found in its prefix cache
    # How many forwards accepted 0, 1, ... tokens of a draft; () without one.
    accepted: tuple[int, ...] = ()
    top_ids: np.ndarray | None = None  # [T, k] int32, the most probable tokens; 0 for a tool's

    @property
    def newest_version(self) -> int:
        """Returns the version of the weights that sampled its last token."""
        return [(0, self.weight_version), *self.newer][-1][1]

    def then(self, rest: "Response") -> "Response":
        """Returns this part of a response followed by `rest`: a tool's output, or the next turn;
        without experts, which SamplePart joins."""
        length = len(self.token_ids)
        spans = [(0, self.weight_version), *self.newer, (length, rest.weight_version)]
        spans += [(length + start, version) for start, version in rest.newer]
        return Response(
            np.concatenate([self.token_ids, rest.token_ids]),
            np.concatenate([self.logprobs, rest.logprobs]),
            rest.finish_reason,
            self.weight_version,
            tuple(now for before, now in pairwise(spans) if before[1] != now[1]),
            None,
            self.num_cached + rest.num_cached,
            tuple(map(sum, zip_longest(self.accepted, rest.accepted, fillvalue=0))),
            _joined_top_ids(self, rest),
        )


def _joined_top_ids(*parts: Response) -> np.ndarray | None:
    k = next((part.top_ids.shape[1] for part in parts if part.top_ids is not None), None)
    if k is None:
        return None
    return np.concatenate(
        [
            np.zeros((len(part.token_ids), k), np.int32) if part.top_ids is None else part.top_ids
            for part in parts
        ]
    )


UNVERIFIED = -1  # the version of weights that no trainer has verified, older than every other


class VersionSpan(TypedDict):
    """The weights that sampled the tokens from `start` on."""

    start: int
    version: str


class Meta(TypedDict):
    """The fields of SGLang's meta_info that are read here."""

    weight_version: str
    finish_reason: dict[str, object] | None  # "type": "stop", "length" or "abort"
    # answer_arrays.py reads these: in JSON [log-probability, id, text] of tokens, k or one a position
    output_token_logprobs: NotRequired[msgspec.Raw]
    output_top_logprobs: NotRequired[msgspec.Raw]
    # Of the prompt from its logprob_start_len-th token on; null for that one.
    input_token_logprobs: NotRequired[msgspec.Raw]
    input_top_logprobs: NotRequired[msgspec.Raw]
    input_token_ids_logprobs: NotRequired[msgspec.Raw]
    weight_versions: NotRequired[list[VersionSpan] | None]
    routed_experts: NotRequired[msgspec.Raw]
    image_tokens: NotRequired[int]
    cached_tokens: NotRequired[int]  # of the prompt
    # Forwards by the number of a draft's tokens that they accepted.
    spec_correct_drafts_histogram: NotRequired[list[int] | None]


class Answer(TypedDict):
    """An answer of /generate."""

    meta_info: Meta
    prompt_token_ids: NotRequired[list[int]]


def version_number(text: str) -> int:
    """Returns an engine's weight version; UNVERIFIED if it is not a number, as for the weights that
    SGLang loads."""
    return int(text) if text.isdigit() else UNVERIFIED


# (number of the turn from 0, ids [T] that it continues, token limit, how many of these ids have
# their experts) -> the turn
SampleTurn = Callable[[int, np.ndarray, int, int], Awaitable[Response]]


@dataclass
class CacheUse:
    """Counts tokens of requests since the last `add_metrics`."""

    newest: int = 0  # version of the weights that rollouts begin with now
    num_read: int = 0
    num_cached: int = 0  # of these, found in a prefix cache
    num_sampled: int = 0  # by rollouts with a key
    # Of these, by newer weights than the key's, after tokens that older weights may have read.
    num_on_older: int = 0
    # Forwards by the number of a draft's tokens that they accepted.
    accepted: Counter[int] = field(default_factory=Counter)

    def count(self, num_read: int, response: Response, key: "CacheKey | None") -> None:
        """Counts a request of `num_read` tokens."""
        self.num_read += num_read
        self.num_cached += response.num_cached
        self.newest = max(self.newest, response.newest_version)
        self.accepted.update(dict(enumerate(response.accepted)))
        if key is not None and key.version is not None:
            spans = [(0, response.weight_version), *response.newer]
            end = len(response.token_ids)
            newer = next((start for start, version in spans if version > key.version), end)
            self.num_sampled += end
            self.num_on_older += end - newer

    def add_metrics(self, metrics: "Metrics", drafts: int) -> None:
        """Adds the fractions, and resets the counts. drafts: tokens that a draft proposes per
        forward."""
        forwards = self.accepted.total()
        for depth in range(1, drafts + 1):
            passed = sum(number for accepted, number in self.accepted.items() if accepted >= depth)
            metrics.add_mean(f"draft/accepted_{depth}", passed, forwards)
        if drafts:
            tokens = sum((1 + accepted) * number for accepted, number in self.accepted.items())
            metrics.add_mean("draft/tokens_per_forward", tokens, forwards)
        self.accepted.clear()
        metrics.add_mean("prefix/hit_fraction", self.num_cached, self.num_read)
        metrics.add_mean("prefix/on_older_keys_fraction", self.num_on_older, self.num_sampled)
        self.num_read = self.num_cached = self.num_sampled = self.num_on_older = 0


@dataclass
class CacheKey:
    """The key of a rollout's requests in prefix caches: the weights that it began with, when its
    first request left."""

    use: CacheUse
    version: int | None = None

    def __call__(self) -> str:
        """Returns the key."""
        if self.version is None:
            self.version = self.use.newest
        return f"weights {self.version}"
