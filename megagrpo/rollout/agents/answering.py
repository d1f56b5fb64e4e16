"""What answers the model's turns in a rollout: an environment, an agent program, or nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megagrpo.data.messages import as_messages
from megagrpo.rollout.response import Response, SampleTurn
from megagrpo.types import Outcome, Prompt

if TYPE_CHECKING:  # it pulls in torch
    from megagrpo.monitor.metrics import Metrics


def _nothing() -> Response:
    return Response(np.zeros(0, np.int32), np.zeros(0, np.float32), "stop", 0)


@dataclass
class SamplePart:
    """One sample of a rollout."""

    prompt_ids: np.ndarray | None  # [T] int32; None: the group's prompt
    response: Response = field(default_factory=_nothing)
    masks: list[np.ndarray] | None = field(default_factory=list)
    """bool, False on the words of an environment; None: all tokens are the model's"""
    shared: int = 0  # tokens of the response, from its first on, that an earlier sample has
    # of the turns, joined once: they are most of a turn's bytes
    experts: list[np.ndarray] = field(default_factory=list)

    def add(self, response: Response, sampled: bool) -> None:
        """Appends a turn. sampled: whether it is trained on."""
        assert self.masks is not None, "made for several turns"
        if response.routed_experts is not None:
            self.experts.append(response.routed_experts)
            response = replace(response, routed_experts=None)
        self.response = self.response.then(response) if self.masks else response
        self.masks.append(np.full(len(response.token_ids), sampled))

    def add_context(self, ids: np.ndarray) -> None:
        """Appends ids [T] int32 that no turn sampled: the words of an environment."""
        version = self.response.newest_version
        response = Response(ids, np.zeros(len(ids), np.float32), "stop", version)
        self.add(response, sampled=False)

    @property
    def routed_experts(self) -> np.ndarray | None:
        """See Sample."""
        return np.concatenate(self.experts) if self.experts else self.response.routed_experts

    @property
    def loss_mask(self) -> np.ndarray | None:
        """[T] bool."""
        if self.masks is None:
            return None
        return np.concatenate([np.zeros(0, np.bool_), *self.masks])


@dataclass(frozen=True)
class RolloutTask:
    """One rollout that is to be played."""

    prompt: Prompt  # the group's
    seed_of: Callable[[str], int]  # ("environment" | "agent") -> the same for a group's rollouts
    turn: SampleTurn
    max_tokens: int  # of a sample's response, with the messages to the model
    decode: Callable[[np.ndarray], str]  # ids of a turn -> text

    @property
    def row(self) -> dict[str, object]:
        """Returns the row of its prompt, as environments and agents get it."""
        prompt = self.prompt
        return {
            "prompt": prompt.words,
            "messages": as_messages(prompt.question),
            "chat": bool(prompt.messages),
            "tools": prompt.tools,
            "answer": prompt.answer,
            "source": prompt.source,
            "extra": prompt.extra,
        }


class Answering(Protocol):
    """Something that answers the model's turns in the rollouts of one leader."""

    waited_for: str  # by rollouts, in words

    async def rollout(self, task: RolloutTask) -> tuple[Sequence[SamplePart], Outcome]:
        """Returns the samples of a rollout, and its outcome: never a reward for one that failed.

        Without a status graders score its one sample. Raises GenerationFailed.
        """

    def add_metrics(self, metrics: "Metrics") -> None:
        """Adds the measurements since the last call."""

    def close(self) -> None:
        """Ends all processes. Idempotent."""


class NoAnswer:
    """Nothing answers: a rollout is one turn, which graders score."""

    waited_for = "the engines"

    async def rollout(self, task: RolloutTask) -> tuple[Sequence[SamplePart], Outcome]:
        """Returns the sample."""
        response = await task.turn(0, task.prompt.token_ids, task.max_tokens, 0)
        return [SamplePart(None, response, masks=None)], Outcome("")

    def add_metrics(self, metrics: "Metrics") -> None:
        """Adds none."""

    def close(self) -> None:
        """Has nothing to end."""
