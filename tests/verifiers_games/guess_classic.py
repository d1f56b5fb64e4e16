"""A game of guesses with the classic interface of verifiers (0.2.0)."""

import verifiers as vf
from datasets import Dataset


def _last(state):
    said = state["trajectory"][-1]["completion"][-1]
    return said["content"] if isinstance(said, dict) else said.content


class Guess(vf.MultiTurnEnv):
    """Answers H or L until the guess is right."""

    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="H" if _last(state) < state["answer"] else "L")]

    @vf.stop
    async def over(self, state):
        return bool(state["trajectory"]) and _last(state) == state["answer"]


def won(state, **kwargs):
    """1 if the last guess was right."""
    return float(_last(state) == state["answer"])


def load_environment():
    """Returns the game."""
    rows = [{"question": "?", "answer": str(number)} for number in range(10)]
    return Guess(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[won]), max_turns=4)
