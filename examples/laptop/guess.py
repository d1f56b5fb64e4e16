"""Guess the number: the environment in configs/guess.yaml, and the games for its warm-up."""

import random

LOWEST, HIGHEST = 1, 20
GUESSES = 5  # 5 halvings find any of 20 numbers; random guesses win 0.23


class Guess:
    """The model writes two digits and "]" and gets H(igher) or L(ower), until it is right: 1.0."""

    def __init__(self, row: dict, seed: int):
        self.goal, self.left = int(row["answer"]), GUESSES

    def reset(self) -> None:
        """Keeps the dataset's prompt."""

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Returns the hint, the reward and whether the game is over. Text that is not a number loses."""
        self.left -= 1
        digits = text.removesuffix("]")
        if len(digits) != 2 or not digits.isdigit():
            return None, 0.0, True
        if int(digits) == self.goal:
            return None, 1.0, True
        return ("H" if int(digits) < self.goal else "L"), 0.0, self.left == 0


def games(num: int, seed: int, name: str) -> list[dict[str, str]]:
    """Returns the rows of a file, each with one of the 20 goals; of sft with a whole game of random
    guesses and true hints, for the form alone."""
    draw, rows = random.Random(f"guess {seed} {name}"), []
    for index in range(num):
        goal, text = index % HIGHEST + LOWEST, ""
        for _ in range(GUESSES):
            guess = draw.randint(LOWEST, HIGHEST)
            text += f"{guess:02}]"
            if guess == goal:
                break
            text += "H" if guess < goal else "L"
        rows.append({"prompt": "?", "answer": text if name == "sft" else f"{goal:02}"})
    draw.shuffle(rows)
    return rows
