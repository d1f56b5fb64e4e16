"""Rewards for parts of a response (process rewards): what a grader may return, and which tokens get
the rewards."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from numbers import Integral, Real

import numpy as np

Span = tuple[int, float]  # (end of a part of the text in characters, its reward)
_BLOCK = 256  # tokens that are decoded together
_CONTEXT = 16  # tokens before a block: a character has at most 4, a tokenizer looks at one


def read_parts(value: object, text: str) -> tuple[object, tuple[Span, ...], tuple[float, ...]]:
    """Returns the value of a grader as (score, rewards of spans of the text, rewards of all
    tokens).

    value: a number; a list with a reward for each token of the response; or a dict with any of
    "score" (for the whole response), "spans" (lists [start, end, reward] in characters of the text)
    and "tokens" (like the list). Other keys of a dict, as in verl's graders, are ignored. Raises
    ValueError.
    """
    if value and isinstance(value, list):
        value = {"tokens": value}
    if not isinstance(value, dict):
        return plain(value), (), ()
    if not value.keys() & {"score", "spans", "tokens"}:
        raise ValueError(
            f"returned a dict with {', '.join(map(repr, value)) or 'nothing'}, "
            "not score, spans or tokens"
        )
    spans, tokens = value.get("spans", []), value.get("tokens", [])
    for start, end, _ in spans:
        if not isinstance(start + end, Integral) or not 0 <= start < end <= len(text):
            raise ValueError(
                f"returned the span [{start}, {end}] of a text of {len(text)} characters"
            )
    for reward in [*tokens, *(reward for *_, reward in spans)]:
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise ValueError(f"returned the reward {reward!r} of a part, not a finite number")
    rewards = sorted((int(end), float(reward)) for _, end, reward in spans)
    return plain(value.get("score", 0.0)), tuple(rewards), tuple(map(float, tokens))


def plain(score: object) -> object:
    """Returns a score of numpy or torch, such as np.isclose's, as a Python number."""
    return getattr(score, "item", lambda: score)()


@dataclass(frozen=True)
class ResponseTokens:
    """The T tokens of a response; a part's reward belongs to the last of the part's tokens that the
    policy sampled."""

    token_ids: np.ndarray  # [T]
    sampled: np.ndarray | None  # [T] bool; None: all
    decode: Callable[[np.ndarray], str]  # as the graded text was decoded

    def rewards(
        self, spans: Sequence[Span], tokens: Sequence[float], weight: float
    ) -> list[tuple[int, float]]:
        """Returns (index of a token, reward times weight). Raises ValueError unless `tokens` has
        one reward per token."""
        if tokens and len(tokens) != len(self.token_ids):
            raise ValueError(
                f"{len(tokens)} rewards of tokens for a response of {len(self.token_ids)}"
            )
        ends = self._last_of([end for end, _ in spans])
        rewards = [(index, reward) for index, (_, reward) in zip(ends, spans, strict=True)]
        rewards += enumerate(tokens)
        rewards = [(index, weight * reward) for index, reward in rewards if reward]
        if self.sampled is None:
            return rewards
        # the last sampled token up to each, or the first one if there is none
        sampled = np.flatnonzero(self.sampled)
        places = np.searchsorted(sampled, [index for index, _ in rewards], "right") - 1
        indices = sampled[np.maximum(places, 0)].tolist()
        return [(index, reward) for index, (_, reward) in zip(indices, rewards, strict=True)]

    def _last_of(self, ends: Sequence[int]) -> list[int]:
        """Returns the index of the token that completes the first `end` characters, for each end.

        It works by blocks, because decoding the text up to every token would be quadratic.
        """
        if not ends:
            return []
        starts = range(0, len(self.token_ids), _BLOCK)
        before = [0, *accumulate(self._length(start, _BLOCK) for start in starts[:-1])]
        lasts = []
        for end in ends:
            block = max(bisect_left(before, end) - 1, 0)
            start = starts[block]
            within = partial(self._length, start)
            numbers = range(1, min(_BLOCK, len(self.token_ids) - start))
            lasts.append(start + bisect_left(numbers, end - before[block], key=within))
        return lasts

    def _length(self, start: int, number: int) -> int:
        """Returns how many characters `number` tokens from `start` on complete.

        Whether the first begins a word or is a part of a character depends on those before it. Not
        exact if a tokenizer has a token per byte and decodes a run of them as a whole (Llama 2).
        """
        context = max(start - _CONTEXT, 0)
        known = self.decode(self.token_ids[context:start])
        both = self.decode(self.token_ids[context : start + number])
        # the sign for an incomplete character
        return len(both.rstrip("\ufffd")) - len(known.rstrip("\ufffd"))
