"""Sampling jobs: the prompts of a batch with the ids of their groups, and batches in flight."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from megagrpo.rollout.admission import BatchDeadline
from megagrpo.rollout.generation import SamplingParams
from megagrpo.types import Prompt, RolloutGroup


@dataclass(frozen=True)
class NumberedPrompt:
    """A prompt of a batch and the id of the group that is sampled for it."""

    group_id: int
    prompt: Prompt
    repeats: int  # earlier occurrences of the prompt in the batch; part of its seeds


def numbered_prompts(prompts: Sequence[Prompt], group_ids: Sequence[int]) -> list[NumberedPrompt]:
    """Returns the prompts of a batch with their group ids."""
    seen: Counter[int] = Counter()
    numbered = []
    for group_id, prompt in zip(group_ids, prompts, strict=True):
        numbered.append(NumberedPrompt(group_id, prompt, seen[prompt.id]))
        seen[prompt.id] += 1
    return numbered


@dataclass(frozen=True)
class SamplingJob:
    """How all prompts of a batch are sampled."""

    purpose: str  # part of every seed
    step: int
    version: int  # of the weights that sample
    params: SamplingParams
    num_samples: int  # responses to each prompt
    attempt: str = ""  # which of a step's batches, if it has several
    regrade: bool = False  # by reward.group_grader
    or_newer: bool = False  # weights that are published meanwhile may sample too
    with_experts: bool = False  # the engines return the experts of each token

    def __str__(self) -> str:
        return f"{self.purpose} step {self.step}, weights {self.version}"

    @property
    def is_urgent(self) -> bool:
        """Returns whether trainers wait for this job only, so that its requests pass those of
        coming steps."""
        return not self.purpose.startswith("train")


@dataclass
class SampledBatch:
    """A batch of prompts that is sampled in the background, until a step has started with it."""

    job: SamplingJob
    deadline: BatchDeadline  # runs while the trainers wait for it
    # This leader's groups by id; filled by the other thread.
    finished: dict[int, RolloutGroup] = field(default_factory=dict)
    share: int = 0  # groups of this leader
    work: "Future[None] | None" = None  # None on ranks that are not leaders
    consumed: bool = False  # returned to a step

    @property
    def done(self) -> bool:
        """Returns whether this rank's share is complete or failed; True without one."""
        return self.work is None or self.work.done()

    @property
    def problem(self) -> str:
        """Returns why it failed, or ""."""
        if self.work is None or not self.work.done() or self.work.cancelled():
            return ""
        exc = self.work.exception()
        return "" if exc is None else f"{type(exc).__name__}: {exc}"
