"""What each grader counts as right, and that a broken answer is an error rather than a wrong response."""

import pytest

from megagrpo.rewards.graders import format as form
from megagrpo.rewards.graders import gsm8k
from megagrpo.rewards.graders import math as mathematics


@pytest.mark.parametrize(
    "text, answer, score",
    [
        ("so she sold 72.\n#### 72", "72", 1),
        ("#### 72", "Natalia sold 48/2 = <<48/2=24>>24\n#### 72", 1),
        ("#### $1,234.", "1234", 1),
        ("####72.0", "72", 1),
        ("#### 72 clips", "72", 1),
        ("#### -5", "-5", 1),
        ("#### 3 and then #### 4", "4", 1),
        ("#### 3 and then #### 4", "3", 0),
        ("#### 0.1", ".1", 1),
        ("#### 123456789012345678901", "123456789012345678900", 0),
        ("72", "72", 0),
        ("#### none", "72", 0),
        ("####", "72", 0),
        ("", "72", 0),
    ],
)
def test_gsm8k_takes_the_number_after_the_last_mark(text, answer, score):
    assert gsm8k.grade(text, answer) == score


def test_gsm8k_formats():
    assert gsm8k.grade("first 3, then 72.", "72", format="last") == 1
    assert gsm8k.grade("no number", "72", format="last") == 0
    assert gsm8k.grade(" 72 ", "72", format="plain") == 1
    assert gsm8k.grade("it is 72", "72", format="plain") == 0
    assert gsm8k.grade("#### 72", "72", format="plain") == 0
    with pytest.raises(ValueError, match="known: hash, last, plain"):
        gsm8k.grade("72", "72", format="lats")


def test_gsm8k_says_that_the_answer_is_at_fault():
    with pytest.raises(ValueError, match="'seventy' is not a number"):
        gsm8k.grade("#### 70", "seventy")


@pytest.mark.parametrize(
    "text, answer, score",
    [
        (r"thus \boxed{\frac{1}{2}}.", "0.5", 1),
        (r"\boxed{2x+1}", "1+2x", 1),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
        (r"\boxed{1} no, \boxed{2}", "2", 1),
        (r"\boxed{1} no, \boxed{2}", "1", 0),
        (r"\boxed{2}", r"so the answer is \boxed{2}", 1),
        (r"\boxed{3}", "4", 0),
        (r"\boxed{", "4", 0),
        (r"\boxed{}", "4", 0),
        ("the answer is 4", "4", 0),
    ],
)
def test_math_compares_the_last_box_symbolically(text, answer, score):
    assert mathematics.grade(text, answer) == score


def test_math_without_a_box_and_with_a_broken_answer():
    assert mathematics.grade("the answer is 4", "4", require_boxed=False) == 1
    with pytest.raises(ValueError, match="not mathematics"):
        mathematics.grade(r"\boxed{1}", "")


def test_math_works_outside_the_main_thread():
    """math-verify's own limits use signal.alarm, which raises there."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(mathematics.grade, r"\boxed{\frac{2}{4}}", "1/2").result() == 1


def test_exact_and_format():
    assert form.exact(" Paris\n", "Paris") == 1
    assert form.exact("paris", "Paris") == 0
    assert form.exact("paris", "Paris", ignore_case=True) == 1
    assert form.grade("<think>a\nb</think>\n<answer>4</answer>", "") == 1
    assert form.grade("<answer>4</answer>", "") == 0
    assert form.grade("12 = 12", "", pattern=r"\d+ = \d+") == 1
    assert form.grade("12 = 12 or so", "", pattern=r"\d+ = \d+") == 0
