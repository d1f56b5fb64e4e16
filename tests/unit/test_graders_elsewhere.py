"""Verdicts of the graders against those of math-verify, verl and LiveCodeBench on golds and on their mutations."""

import random
import re
from collections.abc import Iterator

import math_verify
import pytest

from megagrpo.rewards.graders import gsm8k, math, math_dapo
from megagrpo.sandbox.grader import _same_text
from tests.unit.golden_cases import load
from tests.unit.golds import of_math

GRADERS = {
    "math_dapo": math_dapo.grade,
    "gsm8k": gsm8k.grade,
    "code": lambda text, answer: float(_same_text(text, answer, 1e-6)),
}


@pytest.mark.parametrize("grader", GRADERS)
def test_verdicts_are_those_of_verl_and_livecodebench(grader):
    """`convention`: where `ours` is meant to be another. gsm8k reads more spellings of the right number. Of outputs all
    white space is alike and floats may be rounded, but 03 and other digits are no 3."""
    seen = 0
    for case in load("graders.json"):
        options = dict(case["params"])
        if options.pop("grader") == grader:
            expected = options.pop("ours", case["outputs"]["score"])
            assert GRADERS[grader](**case["inputs"], **options) == expected, case
            seen += 1
    assert seen > 70


def mutated(gold: str) -> Iterator[tuple[bool, str]]:
    """Responses, and whether each is right."""
    yield True, rf"We get $\boxed{{ {gold} }}$"
    yield True, rf"\boxed{{{re.sub(r'.left|.right', '', gold)}}}"
    yield True, rf"\boxed{{{gold}\text{{ cm}}}}"
    yield True, rf"\boxed{{z = {gold}}}"
    digits = [*re.finditer(r"\d+", gold)]
    if digits:
        last = digits[-1]
        yield False, rf"\boxed{{{gold[: last.start()]}{int(last[0]) + 1}{gold[last.end() :]}}}"


def test_math_takes_what_math_verify_takes_and_nothing_that_it_refuses():
    """It reads more signs than math-verify does, and tells more numbers apart."""
    drawn = [(gold, *one) for gold in of_math(0, 1) for one in mutated(gold)]
    for gold, right, text in [
        ("17.", True, r"\boxed{17.\text{ cm}}"),
        ("5", True, r"\boxed{5.\%}"),
        *random.Random(0).sample(drawn, 60),
    ]:
        parsed = [math_verify.parse(each, parsing_timeout=None) for each in (rf"\boxed{{{gold}}}", text)]
        theirs = float(math_verify.verify(*parsed, timeout_seconds=None))
        ours = math.grade(text, gold)
        assert ours >= theirs if right else ours <= theirs, (gold, text, ours)


CASES = r"\boxed{\begin{cases}1 & \text{if } x > 0 \\ 2 & \text{if } x < 0\end{cases}}"


@pytest.mark.parametrize(
    "text, answer, score",
    [
        # numbers behind a unit count
        (r"\boxed{12\text{ cm}, 99\text{ cm}}", r"12\text{ cm}, 16\text{ cm}", 0),
        (r"\boxed{12}", r"12\text{ cm}, 16\text{ cm}", 0),
        (r"\boxed{16, 12}", r"12\text{ cm}, 16\text{ cm}", 1),
        (r"\boxed{(3\mathrm{m}, 4\text{ m}^2)}", "(3, 4)", 1),
        (r"\boxed{x=3\text{ cm}, y=7\text{ cm}}", r"x=3\text{ cm}, y=4\text{ cm}", 0),
        (r"\boxed{5\text{ ft }6\text{ in}}", r"5\text{ ft }8\text{ in}", 0),
        (r"\boxed{5\text{ feet }8\text{ inches}}", r"5\text{ ft }8\text{ in}", 1),
        (r"\boxed{3, 4}", r"3 \text{ or } 4", 1),
        # and so do letters in another type
        (r"\boxed{3 + 4\mathrm{i}}", "7", 0),
        (r"\boxed{3 + 4\mathrm{i}}", "3 + 4i", 1),
        (r"\boxed{2\mathrm{e}^2}", "2", 0),
        (r"\boxed{\frac{1}{\mathrm{e}} - 2\mathrm{e}-1}", r"e^{-1} - 2e - 1", 1),
        (r"\boxed{2\mathbf{i} + 9\mathbf{j}}", r"2\mathbf{i} + 3\mathbf{j}", 0),
        (r"\boxed{3\mathbf{j} + 2\mathbf{i}}", r"2\mathbf{i} + 3\mathbf{j}", 1),
        (r"\boxed{x^2 + \mathrm{C}}", "x^2 + C", 1),
        (r"\boxed{5\mathrm{m}}", "5", 1),
        (r"\boxed{2^{\mathrm{n}}}", r"2^{\mathrm{m}}", 0),
        (r"\boxed{\overrightarrow{\mathrm{AB}}}", r"\overrightarrow{\mathrm{CD}}", 0),
        (r"\boxed{9\,\text{kg}\cdot\text{m}/\text{s}^2}", "9", 1),
        (r"\boxed{6 \text{ or } \sqrt{2}\text{ cm}}", r"6, \sqrt{2}", 1),
        (r"\boxed{9.8\,\mathrm{m}\,\mathrm{s}^{-2}}", "9.8", 1),
        (r"\boxed{8.3\,\mathrm{J\,mol^{-1}\,K^{-1}}}", "8.3", 1),
        (r"\boxed{100\text{ °C}}", "100", 1),
        (r"\boxed{2\text{ m}^{10}}", "2", 1),
        (r"\boxed{5\text{ m} = 500\text{ cm}}", "5", 1),
        (r"\boxed{5 \text{ (mod }7\text{)}}", "5", 1),
        (r"\boxed{x_{\text{min}} = \frac{3}{4}\text{ m}}", "3/4", 1),
        (r"\boxed{x_{\text{min}} = \frac{3}{4}\text{ m}}", "3", 0),
        (r"\boxed{5\text{ m}\times 3\text{ m}.}", r"5\text{ m}\times 3\text{ m}", 1),
        # and all words of a definition by cases
        (CASES.replace("2", "3"), CASES, 0),
        (CASES, CASES.replace("text", "mathrm"), 1),
        (CASES[:-1] + ".}", CASES, 1),
    ],
)
def test_math_keeps_what_math_verify_drops_as_a_unit(text, answer, score):
    assert math.grade(text, answer) == score
