"""What each grader counts as right, and that a broken answer is an error rather than a wrong response."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from megagrpo.rewards.graders import format as form
from megagrpo.rewards.graders import gsm8k
from megagrpo.rewards.graders import math as mathematics

GSM8K, MATH, FORMAT, EXACT = gsm8k.grade, mathematics.grade, form.grade, form.exact


@pytest.mark.parametrize(
    "grade, options, text, answer, score",
    [
        # the number after the last mark
        (GSM8K, {}, "so she sold 72.\n#### 72", "72", 1),
        (GSM8K, {}, "#### 72", "Natalia sold 48/2 = <<48/2=24>>24\n#### 72", 1),
        (GSM8K, {}, "#### $1,234.", "1234", 1),
        (GSM8K, {}, "####72.0", "72", 1),
        (GSM8K, {}, "#### 72 clips", "72", 1),
        (GSM8K, {}, "#### -5", "-5", 1),
        (GSM8K, {}, "#### 3 and then #### 4", "4", 1),
        (GSM8K, {}, "#### 3 and then #### 4", "3", 0),
        (GSM8K, {}, "#### 0.1", ".1", 1),
        (GSM8K, {}, "#### 123456789012345678901", "123456789012345678900", 0),
        (GSM8K, {}, "72", "72", 0),
        (GSM8K, {}, "#### none", "72", 0),
        (GSM8K, {}, "####", "72", 0),
        (GSM8K, {}, "", "72", 0),
        (GSM8K, {"format": "last"}, "first 3, then 72.", "72", 1),
        (GSM8K, {"format": "last"}, "no number", "72", 0),
        (GSM8K, {"format": "plain"}, " 72 ", "72", 1),
        (GSM8K, {"format": "plain"}, "it is 72", "72", 0),
        (GSM8K, {"format": "plain"}, "#### 72", "72", 0),
        # the last box, symbolically
        (MATH, {}, r"thus \boxed{\frac{1}{2}}.", "0.5", 1),
        (MATH, {}, r"\boxed{2x+1}", "1+2x", 1),
        (MATH, {}, r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
        (MATH, {}, r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
        (MATH, {}, r"\boxed{1} no, \boxed{2}", "2", 1),
        (MATH, {}, r"\boxed{1} no, \boxed{2}", "1", 0),
        (MATH, {}, r"\boxed{2}", r"so the answer is \boxed{2}", 1),
        (MATH, {}, r"\boxed{3}", "4", 0),
        (MATH, {}, r"\boxed{", "4", 0),
        (MATH, {}, r"\boxed{}", "4", 0),
        (MATH, {}, "the answer is 4", "4", 0),
        (MATH, {"require_boxed": False}, "the answer is 4", "4", 1),
        (EXACT, {}, " Paris\n", "Paris", 1),
        (EXACT, {}, "paris", "Paris", 0),
        (EXACT, {"ignore_case": True}, "paris", "Paris", 1),
        (FORMAT, {}, "<think>a\nb</think>\n<answer>4</answer>", "", 1),
        (FORMAT, {}, "<answer>4</answer>", "", 0),
        (FORMAT, {"pattern": r"\d+ = \d+"}, "12 = 12", "", 1),
        (FORMAT, {"pattern": r"\d+ = \d+"}, "12 = 12 or so", "", 0),
    ],
)
def test_what_is_right(grade, options, text, answer, score):
    assert grade(text, answer, **options) == score


@pytest.mark.parametrize(
    "grade, options, answer, said",
    [
        (GSM8K, {"format": "lats"}, "72", "known: hash, last, plain"),
        (GSM8K, {}, "seventy", "'seventy' is not a number"),
        (MATH, {}, "", "not mathematics"),
    ],
)
def test_a_wrong_option_or_answer_is_an_error(grade, options, answer, said):
    with pytest.raises(ValueError, match=said):
        grade(r"#### 72 \boxed{1}", answer, **options)


def test_math_works_outside_the_main_thread():
    """math-verify's own limits use signal.alarm, which raises there."""
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(MATH, r"\boxed{\frac{2}{4}}", "1/2").result() == 1
