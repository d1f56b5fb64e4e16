"""Mathematical answers, right, wrong and spelled in many ways: seconds, and who says what."""

import random
from collections.abc import Callable

import numpy as np

from megagrpo.rewards.graders import math, math_dapo
from peers_kit.measure import OURS, Call, Cases
from peers_kit.work import scaled

CASES = Cases()
MATH, DAPO = "grading, math", "grading, DAPO's rule"
Graded = tuple[str, str, str]  # kind, response, answer


def _box(text: object) -> str:
    return rf"\boxed{{{text}}}"


# By kind: a response and its answer, of a number n of 1,000 to 9,999 and one m of 2 to 60.
KINDS: dict[str, Callable[[int, int], tuple[str, str]]] = {
    "integer, right": lambda n, m: (_box(n), str(n)),
    "integer, wrong": lambda n, m: (_box(n + 1), str(n)),
    "thousands with a comma": lambda n, m: (_box(f"{n:,}"), str(n)),
    "thousands with {,}": lambda n, m: (_box(f"{n:,}".replace(",", "{,}")), str(n)),
    "thousands with \\,": lambda n, m: (_box(f"{n:,}".replace(",", r"\,")), str(n)),
    "fraction": lambda n, m: (_box(rf"\frac{{{m}}}{{61}}"), rf"\frac{{{m}}}{{61}}"),
    "fraction, not reduced": lambda n, m: (
        _box(rf"\frac{{{2 * m}}}{{122}}"),
        rf"\frac{{{m}}}{{61}}",
    ),
    "fraction as a/b": lambda n, m: (_box(f"{m}/61"), rf"\frac{{{m}}}{{61}}"),
    "\\dfrac": lambda n, m: (_box(rf"\dfrac{{{m}}}{{61}}"), rf"\frac{{{m}}}{{61}}"),
    "decimal for a fraction": lambda n, m: (_box(f"{m / 4:.2f}"), rf"\frac{{{m}}}{{4}}"),
    "root": lambda n, m: (_box(rf"{m}\sqrt{{3}}"), rf"{m}\sqrt{{3}}"),
    "root, other form": lambda n, m: (_box(rf"\sqrt{{{3 * m * m}}}"), rf"{m}\sqrt{{3}}"),
    "pi": lambda n, m: (_box(rf"{m}\pi"), rf"{m} \pi"),
    "pi as a letter": lambda n, m: (_box(f"{m}π"), rf"{m}\pi"),
    "interval": lambda n, m: (_box(f"(-{m}, {m}]"), f"(-{m},{m}]"),
    "interval, closed wrongly": lambda n, m: (_box(f"[-{m}, {m}]"), f"(-{m},{m}]"),
    "pair": lambda n, m: (_box(f"({n}, {m})"), f"({n},{m})"),
    "pair, exchanged": lambda n, m: (_box(f"({m}, {n})"), f"({n},{m})"),
    "set, other order": lambda n, m: (_box(rf"\{{{n},{m}\}}"), rf"\{{{m},{n}\}}"),
    "two boxes for two values": lambda n, m: (f"{_box(n)} and {_box(n + 2)}", f"{n},{n + 2}"),
    "equation": lambda n, m: (_box(f"x = {n}"), str(n)),
    "unit": lambda n, m: (_box(rf"{n}\text{{ cm}}"), str(n)),
    "unit squared": lambda n, m: (_box(rf"{n}\ \text{{cm}}^2"), str(n)),
    "degrees": lambda n, m: (_box(rf"{m}^\circ"), str(m)),
    "percent": lambda n, m: (_box(rf"{m}\%"), str(m)),
    "dollars": lambda n, m: (_box(rf"\${m}.50"), f"{m}.50"),
    "polynomial, other order": lambda n, m: (_box(f"{m}+{n}x"), f"{n}x+{m}"),
    "product": lambda n, m: (_box(f"(x-{m})(x+{m})"), f"x^2-{m * m}"),
    "matrix": lambda n, m: (
        _box(rf"\begin{{pmatrix}} {n} \\ {m} \end{{pmatrix}}"),
        rf"\begin{{pmatrix}} {n} \\ {m} \end{{pmatrix}}",
    ),
    "choice": lambda n, m: (_box(r"\text{(C)}"), r"\text{(C)}"),
    "choice as a letter": lambda n, m: (_box("C"), r"\text{C}"),
    "no box: the answer is $n$": lambda n, m: (f"So the answer is ${n}$.", str(n)),
    "no box: Answer: n": lambda n, m: (f"Answer: {n}", str(n)),
    "a wrong box, Answer: n": lambda n, m: (f"{_box(n + 1)}\nAnswer: {n}", str(n)),
    "two boxes, the last right": lambda n, m: (f"{_box(n + 1)}, no: {_box(n)}", str(n)),
    "two boxes, the first right": lambda n, m: (f"{_box(n)}, no: {_box(n + 1)}", str(n)),
    "box without braces": lambda n, m: (rf"\boxed {m % 10}", str(m % 10)),
    "box that is not closed": lambda n, m: (rf"\boxed{{{n}", str(n)),
    "power of ten": lambda n, m: (_box(rf"{n} \times 10^{{5}}"), f"{n}00000"),
    "power": lambda n, m: (_box(f"2^{{{m}}}"), str(2**m)),
    "1/n! for 1/(n-1)!": lambda n, m: (
        _box(rf"\frac{{1}}{{{m + 18}!}}"),
        rf"\frac{{1}}{{{m + 17}!}}",
    ),
    "infinity": lambda n, m: (_box(r"(-\infty, 3)"), r"(-\infty,3)"),
    "a sentence after the box": lambda n, m: (f"{_box(n)}. This uses {n + 7}.", str(n)),
    "nothing": lambda n, m: ("I do not know.", str(n)),
}
BEFORE = "We compute step by step; 3 + 4 = 7, and $x_1 = 2$ holds. " * 30


def work() -> list[Graded]:
    chance = random.Random(5)
    made = []
    for i in range(scaled(12 * len(KINDS))):
        kind, make = list(KINDS.items())[i % len(KINDS)]
        text, answer = make(chance.randint(1000, 9999), chance.randint(2, 60))
        made.append((kind, BEFORE + text, answer))
    return made


def _graded(grade: Callable[[str, str], float], least: float = 0.5) -> Call:
    answers = work()

    def judged(text: str, answer: str) -> float:
        try:
            return float(grade(text, answer) > least)
        except Exception:  # the answer is wrong, says the grader
            return -1.0

    for _, text, answer in answers[:3]:  # their first use builds parsers
        judged(text, answer)

    def call():
        scores = np.array([judged(text, answer) for _, text, answer in answers])
        return scores, {"answers": len(scores), "right": int((scores > 0).sum())}

    return call


@CASES.add(MATH, OURS)
def _our_math() -> Call:
    return _graded(math.grade)


@CASES.add(MATH, "verl")
def _verl_math() -> Call:
    """The function that its pool of processes runs."""
    from verl.utils.reward_score import math_verify

    return _graded(lambda text, answer: math_verify._verify_in_subprocess(_box(answer), text))


@CASES.add(MATH, "TRL")
def _trl_math() -> Call:
    from trl.rewards import accuracy_reward

    def grade(text: str, answer: str) -> float:
        completion = [{"role": "assistant", "content": text}]
        (score,) = accuracy_reward([completion], [_box(answer)])
        if score is None:
            raise ValueError(answer)
        return score

    return _graded(grade)


@CASES.add(DAPO, OURS)
def _our_dapo() -> Call:
    return _graded(math_dapo.grade, 0.0)


@CASES.add(DAPO, "verl")
def _verl_dapo() -> Call:
    from verl.utils.reward_score import math_dapo as theirs

    return _graded(lambda text, answer: theirs.compute_score(text, answer)["score"], 0.0)
