"""Makes one-step word problems: {"prompt": "Anna has 3 apples and gets 4 more. How many ...?",
"answer": "7"}.

The warm-up's answers are equations, "3+4=7": the form in which a small model can think before its
last number. No sum or difference is in two of the three files, and the held-out ones are worded in
ways that the others never are.
"""

import random
from itertools import product
from typing import NamedTuple

from examples.laptop.recipe import DatasetConfig

Wordings = dict[str, tuple[str, ...]]  # sign -> ways to tell a problem

_NAMES = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Jack",
    "Lily",
    "Max",
    "Mia",
    "Noah",
    "Rosa",
    "Sam",
    "Tom",
    "Zoe",
)
_THINGS = (
    "apples",
    "balls",
    "books",
    "cards",
    "coins",
    "cups",
    "eggs",
    "flowers",
    "pens",
    "shells",
    "stamps",
    "toys",
)
_WORDINGS: Wordings = {
    "+": (
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have?",
        "{name} finds {a} {things} and then {b} more. How many {things} is that?",
        "There are {a} {things} in a box. {name} puts in {b} more. How many {things} are in the "
        "box?",
    ),
    "-": (
        "{name} has {a} {things} and gives away {b}. How many {things} are left?",
        "{name} had {a} {things} and lost {b}. How many {things} does {name} still have?",
        "There are {a} {things} in a box. {name} takes out {b}. How many {things} are in the box?",
    ),
}
_HELD_OUT_WORDINGS: Wordings = {
    "+": (
        "{name} buys {a} {things} on Monday and {b} {things} on Friday. How many {things} did "
        "{name} buy?",
        "On a table lie {a} {things}. {name} brings another {b}. How many {things} lie there now?",
    ),
    "-": (
        "A shop had {a} {things} and sold {b} of them to {name}. How many {things} remain?",
        "{name} collected {a} {things}, but {b} of them broke. How many {things} are whole?",
    ),
}
_SHARES = {"eval": 0.2, "sft": 0.2, "train": 0.6}  # of the sums and differences


class Sum(NamedTuple):
    """The sum in a problem: a + b with a <= b, in either order, or a - b with a > b."""

    sign: str
    a: int
    b: int

    @property
    def answer(self) -> str:
        """Returns the right answer as text."""
        return str(self.a + self.b if self.sign == "+" else self.a - self.b)


def word_problems(
    config: DatasetConfig, seed: int
) -> tuple[dict[str, list[dict[str, str]]], dict[str, int]]:
    """Returns the rows of the three files by name, and the counts. The same seed gives the same rows.

    Raises ValueError when a file asks for more problems than its numbers and wordings give.
    """
    choose = random.Random(f"word problems {seed}")
    sums = _sums(config.max_operand)
    choose.shuffle(sums)
    wanted = {"eval": config.num_eval, "sft": config.num_sft, "train": config.num_train}
    files, first, share = {}, 0, 0.0
    for name, number in wanted.items():
        share += _SHARES[name]
        last = round(share * len(sums))
        wordings = _HELD_OUT_WORDINGS if name == "eval" else _WORDINGS
        key = f"dataset.num_{name}"
        files[name] = _rows(
            sums[first:last], wordings, number, key, choose, equations=name == "sft"
        )
        first = last
    return files, {"different sums and differences": len(sums)}


def _sums(largest: int) -> list[Sum]:
    numbers = range(2, largest + 1)
    pairs = list(product(numbers, numbers))
    return [Sum("+", a, b) for a, b in pairs if a <= b] + [
        Sum("-", a, b) for a, b in pairs if a > b
    ]


def _rows(
    sums: list[Sum],
    wordings: Wordings,
    number: int,
    key: str,
    choose: random.Random,
    equations: bool = False,
) -> list[dict[str, str]]:
    """Returns `number` different problems: every sum equally often, each with a wording, a name and
    things drawn."""
    most = (
        len(sums) * len(_NAMES) * len(_THINGS)
    )  # one wording each: at least half of the different ones
    if number > most:
        raise ValueError(
            f"{key}: {number} problems wanted, but {len(sums)} sums and differences give only "
            f"{most}"
        )
    rows: dict[str, str] = {}
    while len(rows) < number:
        asked = sums[len(rows) % len(sums)]
        a, b = (asked.a, asked.b) if asked.sign == "-" else choose.sample((asked.a, asked.b), 2)
        prompt = choose.choice(wordings[asked.sign]).format(
            name=choose.choice(_NAMES), things=choose.choice(_THINGS), a=a, b=b
        )
        rows[prompt] = f"{a}{asked.sign}{b}={asked.answer}" if equations else asked.answer
    items = [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]
    choose.shuffle(items)
    return items
