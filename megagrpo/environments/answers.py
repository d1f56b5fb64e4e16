"""The reward for an answer that ends a rollout, from one of the graders, and outputs cut to a limit."""

from collections.abc import Callable, Mapping

from megagrpo.rewards.graders.functions import load_grader
from megagrpo.rewards.worker import grade


def shortened(output: str, most: int, end: bool = False) -> str:
    """Returns the first `most` characters of an output, or its end, and says so if it has more."""
    cut = len(output) - most
    if cut <= 0:
        return output
    return f"[output cut]\n{output[cut:]}" if end else f"{output[:most]}\n[output cut]"


def answer_grader(grader: str, row: Mapping[str, object]) -> Callable[[str], float]:
    """Returns a function that rewards a rollout's answer as `reward.grader` would.

    Raises ValueError for an unknown grader. The function raises RuntimeError if there is no score,
    or if the grader rewards parts of the text.
    """
    load_grader(grader, {})  # an unknown one is refused before the rollout
    question = "messages" if row["chat"] else "prompt"

    def reward(text: str) -> float:
        values = [row[key] for key in ("answer", "source", "extra", question, "chat")]
        graded = grade("grade", grader, {}, [text, *values])
        if graded.status != "score" or graded.spans or graded.tokens:
            raise RuntimeError(
                graded.detail or f"{grader} rewards parts of a text, and an answer has one reward"
            )
        return graded.scores[0]

    return reward
