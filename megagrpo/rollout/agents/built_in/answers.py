"""The reward of an answer that ends a rollout, by one of the graders."""

from collections.abc import Mapping

from megagrpo.rewards.graders.table import load_grader
from megagrpo.rewards.worker import grade


class AnswerGrader:
    """Rewards a rollout's answer as `reward.grader` would. Raises ValueError for an unknown grader."""

    def __init__(self, grader: str, row: Mapping[str, object]):
        load_grader(grader, {})  # an unknown one is refused before the rollout
        self._grader, self._row = grader, row

    def reward(self, text: str) -> float:
        """Returns the score. Raises RuntimeError if there is none, or one for parts of the text."""
        graded = grade("grade", self._grader, {}, [text, *(self._row[key] for key in ("answer", "source", "extra"))])
        if graded.status != "score" or graded.spans or graded.tokens:
            problem = f"{self._grader} rewards parts of a text, and an answer has one reward"
            raise RuntimeError(graded.detail or problem)
        return graded.scores[0]
