"""What the source asks of the engines: jobs, the places of their prompts, and batches that are being sampled."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from megagrpo.rollout.background import Patience
from megagrpo.rollout.generation import SamplingParams
from megagrpo.types import Prompt, RolloutGroup


@dataclass
class BegunBatch:
    """Holds what is sampled in the background of a batch of prompts, until a step has begun with all of it."""

    places: list[int]  # of its prompts in the run, of all leaders, by place in the batch
    finished: dict[int, RolloutGroup]  # of this leader, by place in the batch; grows in the other thread
    patience: Patience  # begins when somebody waits for it
    work: "Future[None] | None" = None  # None on ranks that are no leaders
    taken: set[int] = field(default_factory=set)  # places, of all leaders

    @property
    def done(self) -> bool:
        """Tells whether this rank has nothing to wait for."""
        return self.work is None or self.work.done()

    @property
    def ready(self) -> dict[int, RolloutGroup]:
        """Returns this leader's finished groups that were not taken, by place in the run."""
        finished = self.finished.copy()
        return {self.places[i]: group for i, group in finished.items() if self.places[i] not in self.taken}

    @property
    def problem(self) -> str:
        """Returns why it failed, "" where it has not."""
        if self.work is None or not self.work.done() or self.work.cancelled():
            return ""
        if (exc := self.work.exception()) is None:
            return ""
        return f"{type(exc).__name__}: {exc}"


@dataclass(frozen=True)
class PromptSlot:
    """Holds a prompt's place in its batch, for which a group is sampled."""

    group_id: int
    prompt: Prompt
    again: int  # how often the prompt has come before in the same batch; part of its seeds


def prompt_slots(prompts: Sequence[Prompt]) -> list[PromptSlot]:
    """Returns the places of a batch's prompts."""
    seen: Counter[int] = Counter()
    slots = []
    for group_id, prompt in enumerate(prompts):
        slots.append(PromptSlot(group_id, prompt, seen[prompt.id]))
        seen[prompt.id] += 1
    return slots


@dataclass(frozen=True)
class SamplingJob:
    """Holds what one call asks for: the same for every prompt."""

    purpose: str  # part of every seed
    step: int
    version: int  # of the weights that sample
    params: SamplingParams
    num_samples: int  # responses to each prompt
    again: str = ""  # which of a step's batches, where it has several
    regrade: bool = False  # by reward.group_grader
    or_newer: bool = False  # weights that are published meanwhile may go on
    with_experts: bool = False  # those that the engines chose come with the tokens

    def __str__(self) -> str:
        return f"{self.purpose} step {self.step}, weights {self.version}"

    @property
    def waited_for(self) -> bool:
        """Tells whether the trainers wait for it alone, so that its requests pass those of coming steps."""
        return not self.purpose.startswith("train")
