"""The reward of an answer that ends a rollout, by one of the graders."""

from collections.abc import Callable, Mapping

from megagrpo.rewards.graders.table import load_grader
from megagrpo.rewards.worker import grade


def answer_grader(grader: str, row: Mapping[str, object]) -> Callable[[str], float]:
    """Returns a function that rewards a rollout's answer as `reward.grader` would.

    Raises ValueError for an unknown grader; the function RuntimeError without a score, or for one
    of parts of the text.
    """
    load_grader(grader, {})  # an unknown one is refused before the rollout

    def reward(text: str) -> float:
        question = row["messages"] if row["chat"] else row["prompt"]
        of_row = [row[key] for key in ("answer", "source", "extra")]
        graded = grade("grade", grader, {}, [text, *of_row, question, row["chat"]])
        if graded.status != "score" or graded.spans or graded.tokens:
            raise RuntimeError(
                graded.detail or f"{grader} rewards parts of a text, and an answer has one reward"
            )
        return graded.scores[0]

    return reward
