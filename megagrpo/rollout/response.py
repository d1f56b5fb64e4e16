"""A response as an engine sampled it, and how parts of one are joined. Loads without an HTTP client."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from megagrpo.types import WithArrays


@dataclass(frozen=True, eq=False)
class Response(WithArrays):
    """Holds T token ids as sampled, the one that ended the response included."""

    _types: ClassVar[dict[str, type]] = {"token_ids": np.int32, "logprobs": np.float32}

    token_ids: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32, the engine's, of each token, in nats, after temperature
    finish_reason: str  # "stop" | "length" | "cut"
    weight_version: int  # of the weights that sampled its first token
    newer: tuple[tuple[int, int], ...] = ()  # as in Sample
    routed_experts: np.ndarray | None = None  # [tokens, layers with experts, k], from the requested token on

    @property
    def newest_version(self) -> int:
        """Returns the version of the weights that sampled its last token."""
        return self.newer[-1][1] if self.newer else self.weight_version

    def then(self, rest: "Response") -> "Response":
        """Returns this part of a response followed by `rest`: after a cut, a tool's output, or the next turn."""
        length = len(self.token_ids)
        spans = [(0, self.weight_version), *self.newer, (length, rest.weight_version)]
        spans += [(length + start, version) for start, version in rest.newer]
        experts = [part.routed_experts for part in (self, rest) if part.routed_experts is not None]
        return Response(
            np.concatenate([self.token_ids, rest.token_ids]),
            np.concatenate([self.logprobs, rest.logprobs]),
            rest.finish_reason,
            self.weight_version,
            tuple(now for before, now in pairwise(spans) if before[1] != now[1]),
            np.concatenate(experts) if experts else None,
        )
