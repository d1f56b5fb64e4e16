"""What each grader counts as right; broken answers; which tokens get parts of a reward; verl's graders as they are."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import ANY

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.config.reward import RewardConfig
from megagrpo.environments import sql
from megagrpo.rewards import worker
from megagrpo.rewards.graders import format as form
from megagrpo.rewards.graders import gsm8k, math_dapo
from megagrpo.rewards.graders import math as mathematics
from megagrpo.rewards.graders.functions import check_grader
from megagrpo.rewards.part_rewards import ResponseTokens, read_parts
from megagrpo.rewards.pool import RewardPool
from megagrpo.types import Prompt

GSM8K, MATH, FORMAT, EXACT = gsm8k.grade, mathematics.grade, form.grade, form.exact
DAPO = math_dapo.grade
BOX = {"box": True}


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
        (GSM8K, {}, "#### $-5", "-$5", 1),
        (GSM8K, {}, "#### 3 and then #### 4", "4", 1),
        (GSM8K, {}, "#### 3 and then #### 4", "3", 0),
        (GSM8K, {}, "#### 0.1", ".1", 1),
        (GSM8K, {}, "#### 123456789012345678901", "123456789012345678900", 0),
        (GSM8K, {}, "72", "72", 0),
        (GSM8K, {}, "#### none", "72", 0),
        (GSM8K, {}, "####", "72", 0),
        (GSM8K, {}, "", "72", 0),
        (GSM8K, {"format": "last"}, "first 3, then 72.", "72", 1),
        (GSM8K, {"format": "last"}, "It is \u22123.", "-3", 1),
        (GSM8K, {}, "#### -3", "so #### \u22123", 1),
        (GSM8K, {"format": "last"}, "no number", "72", 0),
        (GSM8K, {}, "#### **72**", "72", 1),
        (GSM8K, {}, "####\u00a0**\u00a072**", "72", 1),
        (GSM8K, {}, "####\r\n72", "72", 1),
        (MATH, {"require_boxed": False}, "Then 2*234 = 468. Final Answer: **73**", "73", 1),
        (MATH, {}, r"\boxed{**73**}", "73", 1),
        (MATH, {}, r"\boxed{2**3}", "8", 1),
        (MATH, {}, r"\boxed{4\sqrt(2)}", r"4\sqrt{2}", 1),
        (MATH, {}, r"\boxed{4\sqrt(2)}", "4", 0),
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
        (MATH, {}, r"\boxed{4}. Check: \boxed{", "4", 1),
        (MATH, {}, r"\boxed{3}", "4", 0),
        (MATH, {}, r"\boxed{", "4", 0),
        (MATH, {}, r"\boxed{}", "4", 0),
        (MATH, {}, "the answer is 4", "4", 0),
        (MATH, {"require_boxed": False}, "the answer is 4", "4", 1),
        # the last line of an answer, as text
        (DAPO, {}, "so x = 34.\nAnswer: 34", "34", 1),
        (DAPO, {}, "ANSWER :\t34\nThat is all.", "34", 1),
        (DAPO, {}, "Answer: 1\nno, wait. Answer: 2", "2", 1),
        (DAPO, {}, "Answer: 1\nno, wait. Answer: 2", "1", -1),
        (DAPO, {}, r"\boxed{34}", "34", -1),
        (DAPO, {}, "Answer: 34" + "." * 291, "34", -1),
        (DAPO, {}, f"Answer: 34\n{'.' * 289}", "34", 1),
        (DAPO, {}, "Answer: $x = 1,234$ dollars", "1234", 1),
        (DAPO, {}, "Answer: the value is $12$.", "12", 1),
        (DAPO, {}, "**Answer:** $12$", "12", 1),
        (DAPO, {}, "**Answer:** 12", "12", -1),
        (DAPO, {}, r"Answer: \boxed{\frac12}", r"\frac{1}{2}", 1),
        (DAPO, {}, r"Answer: $\sqrt2$", r"\sqrt{2}", 1),
        (DAPO, {}, r"Answer: 90^\circ", "90", 1),
        (DAPO, {}, r"Answer: 5\text{ cm}", "5", 1),
        (DAPO, {}, "Answer: 34.0", "34", -1),
        (DAPO, {}, "Answer: 34.", "34", -1),
        (DAPO, {}, "", "34", -1),
        # verl 0.9.1's compute_score gives these (reward_score/math_dapo.py)
        (DAPO, BOX, r"so \boxed{34}.", "34", 1),
        (DAPO, BOX, r"\boxed{35}, no: \boxed{\frac{1}{2}}", r"\frac12", 1),
        (DAPO, BOX, r"so \boxed{34}", "35", -1),
        (DAPO, BOX, r"\boxed{34}, again \boxed{34", "34", -1),
        (DAPO, BOX, "Answer: 35\n" + r"\boxed{34}", "34", -1),
        (DAPO, BOX, "Answer: 34\n" + r"\boxed{35}", "34", 1),
        (DAPO, BOX, r"\boxed{x = 1,234}", "1234", 1),
        (DAPO, BOX, r"\boxed{34}" + "." * 90, "34", 1),
        (DAPO, BOX, r"\boxed{34}" + "." * 91, "34", -1),
        (DAPO, BOX, "34", "34", -1),
        (EXACT, {}, " Paris\n", "Paris", 1),
        (EXACT, {}, "paris", "Paris", 0),
        (EXACT, {"ignore_case": True}, "paris", "Paris", 1),
        (FORMAT, {}, "<think>a\nb</think>\n<answer>4</answer>", "", 1),
        (FORMAT, {}, "a\nb</think>\n<answer>4</answer>", "", 1),  # <think> stood in the prompt
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


GOLDS = [  # golds.py and report_cases.py have the usual ones
    r"\boxed{2},\boxed{5}", r"\boxed{2}\text{ or }\boxed{5}",
    r"\boxed{\boxed{7}}", r"\boxed{x=\fbox{3}}", r"\boxed\sqrt2",
    r"So $\boxed{\left\{\begin{array}{l}x=1\\y=2\end{array}\right.}$.", r"\boxed\pi", r"\boxed{-\infty}",
    "√(x+1)", "（1，2）", "∅", r"\varnothing", "2π",
]  # fmt: skip


@pytest.mark.parametrize("gold", GOLDS)
def test_math_takes_each_gold_for_itself(gold):
    response = gold if "box" in gold else f"It is $\\boxed{{{gold}}}$."
    assert MATH(response, gold) == 1
    assert MATH(r"Hence \boxed{4711}.", gold) == 0


@pytest.mark.parametrize(
    "text, answer, score",
    [
        (r"\boxed{5}", r"\boxed{2} and \boxed{5}", 0),
        (r"\boxed{5, 2}", r"\boxed{2} and \boxed{5}", 1),
        (r"\boxed{7} \boxed{7}", "7", 1),
        (r"\boxed{7\ }", "7", 1),
        (r"\boxedtext{7}", "7", 0),
        (r"\boxed{1000}", r"1\,000", 1),
        (r"\boxed{\emptyset}", r"\varnothing", 1),
        (r"\boxed{\mathbb R}", r"\mathbb{R}", 1),
        (r"\boxed{\frac12}", "½", 1),
        (r"\boxed{\sqrt{2}}", "√2", 1),
        (r"\boxed{1e3}", "1000", 1),
        (r"\boxed{5.}", "5", 1),
        (r"\boxed{5}", r"5.0", 1),
        (r"\boxed{1.6\times10^{-19}}", r"1.7\times10^{-19}", 0),
        (r"\boxed{0.333333}", r"\frac13", 1),
        # an interval and its inequality, either of which may be the gold (Math-Verify 25, 49, 71)
        (r"\boxed{-2 \le x \le 7}", "[-2,7]", 1),
        (r"\boxed{[-2,7]}", r"-2 \le x \le 7", 1),
        (r"\boxed{-2 \le x \le 7}", r"x \in [-2,7]", 1),
        (r"\boxed{x \ne 0}", r"(-\infty,0)\cup(0,\infty)", 1),
        (r"\boxed{1<x<2}", "[1,2]", 0),
        (r"\boxed{1<x<2}", r"\{1,2\}", 0),
        (r"\boxed{1, 2}", "1<x<2", 0),
        # repeating decimals and mixed numbers
        (r"\boxed{\frac{1}{3}}", r"0.\overline{3}", 1),
        (r"\boxed{0.1\overline{6}}", "1/6", 1),
        (r"\boxed{-.\bar{3}}", r"-\frac13", 1),
        (r"\boxed{0.\overline{9}}", "1", 1),
        (r"\boxed{0.3}", r"0.\overline{3}", 0),
        (r"\boxed{1 1/2}", "3/2", 1),
        (r"\boxed{1~\frac12}", "3/2", 1),
        (r"\boxed{1 1/2}", "1", 0),
        (r"\boxed{1/2}", "1 1/2", 0),
        # a choice: its letter, with or without its text
        (r"\boxed{B. 5}", "B", 1),
        (r"\boxed{\text{(B) } 5}", "B", 1),
        (r"\boxed{\textbf{(B) }12}", "(B)", 1),
        (r"\boxed{B}", r"\textbf{(B)}\ 12", 1),
        (r"\boxed{12}", r"\textbf{(B)}\ 12", 1),
        (r"\boxed{13}", r"\textbf{(B)}\ 12", 0),
        (r"\boxed{\text{B: } x > 3}", "x > 3", 1),
        (r"\boxed{B. }", "B", 1),
        (r"\boxed{B}", "(B) A = 3", 1),
        (r"\boxed{A}", "(A)(C)", 0),
        (r"\boxed{(A)(C)}", "(A)(C)", 1),
        (r"\boxed{(A) and (B)}", "(A) and (C)", 0),
        (r"\boxed{A: 3, B: 7}", "A: 3, B: 5", 0),
        (r"\boxed{A:B=3:2}", "A:B=2:3", 0),
        (r"\boxed{0.\overline 3}", "0", 0),
        (r"\boxed{2.\ldots}", "2", 0),
        (r"\boxed{C. 5}", "B", 0),
        (r"\boxed{C. 12}", r"\textbf{(B)}\ 12", 0),
        (r"\boxed{BC}", "B", 0),
        (r"\boxed{(A)+1}", "A+1", 1),
        (r"\boxed{(A, 1)}", "A", 0),
        # false equations
        (r"\boxed{2 = 3}", "3", 0),
        (r"\boxed{2+2=5}", "5", 0),
        (r"\boxed{1+2=3=6}", "6", 0),
        (r"\boxed{2+3=5}", "5", 1),
        (r"\boxed{\frac{1}{3}=0.333}", "0.333", 1),
        (r"\boxed{50\% = 0.5}", "0.5", 1),
        # a percentage equals its number and its value, whatever number it is
        (r"\boxed{12.5\%}", "12.5", 1),
        (r"\boxed{12.5\ \%}", "12.5", 1),
        (r"\boxed{12.5}", r"12.5\%", 1),
        (r"\boxed{12.5\%}", "0.125", 1),
        (r"\boxed{12.5\%}", r"\frac{25}{2}", 1),
        (r"\boxed{33\frac{1}{3}\%}", r"33\frac13", 1),
        (r"\boxed{66.7\%}", r"66\frac23", 0),
        (r"\boxed{12\frac{1}{3}\%}", r"33\frac{1}{3}\%", 0),
        (r"\boxed{33\frac13\%}", r"\frac{100}{3}\%", 1),
        (r"\boxed{12\frac{1}{3}\%}", r"\frac{1}{300}", 0),
        (r"\boxed{12.5\%}", "1.25", 0),
        (r"\boxed{90^\circ = \frac{\pi}{2}}", r"\frac{\pi}{2}", 1),
        (r"\boxed{e = \frac34}", "3/4", 1),
        (r"\boxed{x = 5}", "5", 1),
        # a condition in words
        (r"\boxed{2x \text{ for all real } x}", "2x", 1),
        (r"\boxed{f(x)=cx}", r"f(x)=cx \text{ for any } c", 1),
        (r"\boxed{3}", r"3 \text{ hours if they work alone}", 1),
        (r"\boxed{2^k, \text{where } k \ge 1}", "2^k", 1),
        (r"\boxed{2^k where k \ge 2}", r"2^k \text{ where } k \ge 1", 0),
        (r"\boxed{5 \text{ where } x = 7}", "7", 0),
        (r"\boxed{3 \text{ if } n = 1, 5 \text{ if } n = 2}", "3", 0),
        (r"\boxed{n \text{ such that } n = 4}", "4", 1),
        # a factor is no unit (Math-Verify 36), and a unit still is
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2} b h", 0),
        (r"\boxed{\frac{bh}{2}}", r"\frac{1}{2} b h", 1),
        (r"\boxed{\pi r^2}", r"\pi r^2h", 0),
        (r"\boxed{0}", "5 - 5c", 0),
        (r"\boxed{v_0}", "x = v_0 t", 0),
        (r"\boxed{A\cos\omega}", r"A\cos \omega t", 0),
        (r"\boxed{4}", "4ab", 0),
        (r"\boxed{4ba}", "4ab", 1),
        (r"\boxed{x = 5 m}", "5", 1),
        (r"\boxed{1.6\times10^{-19} s}", r"1.6\times 10^{-19}", 1),
        # as calculators and sympy write (sieval 68)
        (r"\boxed{7\sin(\frac{\pi}{5}x)+1}", "7*sin(pi*x/5)+1", 1),
        (r"\boxed{7\sin(\frac{\pi}{5}x)+2}", "7*sin(pi*x/5)+1", 0),
        (r"\boxed{\frac{\ln 3}{2}}", "ln(3)/2", 1),
        (r"\boxed{e^{2x}}", "exp(2*x)", 1),
        (r"\boxed{\frac{\mathrm{e}-1}{\mathrm e}}", "1-1/e", 1),
        (r"\boxed{1-\frac{1}{e}}", r"1+\frac{1}{\mathrm{e}}", 0),
        (r"\boxed{3+2\mathrm{i}}", "3+2i", 1),
        (r"\boxed{\ln\mathrm{e}}", "1", 1),
        (r"\boxed{1024}", "2**10", 1),
        (r"\boxed{9**0.5}", "0.5", 0),  # not 9^0 times .5
        (r"\boxed{9**0.5}", "3", 1),
        (r"\boxed{2**-1}", "0.5", 1),
        # i is no unit, and stays the imaginary one
        (r"\boxed{4i + 3}", "3 + 4i", 1),
        (r"\boxed{\frac{6 + 8i}{2}}", "3 + 4i", 1),
        (r"\boxed{\{1 + 2i, 1 - 2i\}}", "1 - 2i, 1 + 2i", 1),
        (r"\boxed{\frac{3}{5} + \frac{4}{5}i}", r"\frac{3 + 4i}{5}", 1),
        (r"\boxed{2\sqrt{3}i}", r"2i\sqrt{3}", 1),
        (r"\boxed{0.5 + 0.5i}", r"\frac{1 + i}{2}", 1),
        (r"\boxed{(1 + i)^2}", "2i", 1),
        (r"\boxed{-\frac1i}", "1i", 1),
        (r"\boxed{\text{No solution}}", "no solution", 1),
        (r"\boxed{\frac{3x}{5} + \frac{4}{5}i}", r"\frac{3x + 4i}{5}", 1),
        (r"\boxed{1 - 2i}", "1 + 2i", 0),
        (r"\boxed{\sum_{i=1}^n i}", r"\frac{n(n + 1)}{2}", 1),
        # decimals inside roots and functions
        (r"\boxed{\sqrt{0.5}}", r"\frac{\sqrt{2}}{2}", 1),
        (r"\boxed{-\ln 2}", r"\ln 0.5", 1),
        (r"\boxed{10\sqrt{0.5}}", r"5\sqrt{2}", 1),
        (r"\boxed{\ln 0.5}", r"-\ln 2.1", 0),
        (r"\boxed{33.3333333\%}", r"\frac13", 1),
        # times of day and bases
        (r"\boxed{1:3}", "10:30", 0),
        (r"\boxed{10:30}", "10:30", 1),
        (r"\boxed{1:00}", "12:00", 0),
        (r"\boxed{9:5}", "9:05", 0),
        (r"\boxed{6:8}", "3:4", 1),
        (r"\boxed{3/4}", "3:4", 1),
        # a list with an ellipsis, and what is no LaTeX, is not its last number
        (r"\boxed{1, 2, \ldots, 100}", "100", 0),
        (r"\boxed{100}", r"1, 2, \ldots, 100", 0),
        (r"\boxed{5, 7, \ldots, 10}", r"0, 1, \cdots, 10", 0),
        (r"\boxed{0,1,...,10}", r"0, 1, \dots, 10", 1),
        (r"\boxed{3.14\ldots}", "3.14", 1),
        (r"\boxed{3 \to 7}", "7", 0),
        (r"\boxed{3 \\ 7}", "7", 0),
        (r"\boxed{\{3, 5\} 7}", "7", 0),
        (r"\boxed{\geq 7}", "7", 0),
        (r"\boxed{3 & 7}", r"\boxed{3 & 7}", 1),
        (r"\boxed{7}", r"\boxed{3 & 7}", 0),
        (r"\boxed{72}", "She has 48 + 24.\n#### 72", 1),
        (r"\boxed{7 \text{ apples}}", "7", 1),
        (r"\boxed{12_7}", "12_5", 0),
        (r"\boxed{12_{5}}", "12_5", 1),
        (r"\boxed{12}", "12_5", 1),
        # words of the same letters; math-verify multiplies them
        (r"\boxed{BADC}", "ABCD", 0),
        (r"\boxed{A B C}", "ACB", 0),
        (r"\boxed{ABC}", "A B C", 1),
        (r"\boxed{\angle ACB}", r"\angle ABC", 0),
        (r"\boxed{THH}", "HHT", 0),
        (r"\boxed{listen}", "silent", 0),
        (r"\boxed{\text{live}}", "evil", 0),
        (r"\boxed{zyx}", "xyz", 1),
        # the same word in another case; math-verify takes one e for Euler's number
        (r"\boxed{Even}", "even", 1),
        (r"\boxed{true}", "True", 1),
        (r"\boxed{\text{true}}", "true", 1),
        (r"\boxed{\text{True}}", "True", 1),
        (r"\boxed{a \cdot b \cdot c \cdot d}", "abcd", 1),
        (r"\boxed{Even}", "Eves", 0),
        (r"\boxed{infinity}", r"\infty", 1),
        (r"\boxed{\infty}", "infinity", 1),
        (r"\boxed{x²+1}", "1+x^2", 1),
        (r"\boxed{x²}", "x³", 0),
        # sympy computes no number of it
        (r"\boxed{7 \mod 3}", "1", 1),
        (r"\boxed{2}", r"7 \mod 3", 0),
        (r"\boxed{BA}", "AB", 1),
        (r"\boxed{2 \cdot BCA + x}", r"x + 2ABC", 0),
        (r"\boxed{P \cdot Q \cdot R}", "PQR", 1),
        # more digits than Python reads
        (rf"\boxed{{{'1' * 5000}.\overline{{3}}}}", "5", 0),
        # equal before sympy computes it
        (r"\boxed{9^{9^{9^9}}}", "9^{9^{9^9}}", 1),
        # of names sympy makes 1 and their product
        (r"\boxed{m+n-1}", r"m+n-\gcd(m,n)", 0),
        (r"\boxed{mn}", r"\operatorname{lcm}(m,n)", 0),
        (r"\boxed{\gcd(a,c)}", r"\gcd(a,b)", 0),
        (r"\boxed{2^{\text{gcd}(n,m)}-1}", r"2^{\gcd\left(m, n\right)}-1", 1),
        (r"\boxed{6}", r"\gcd(12,18)", 1),
    ],
)
def test_math_reads_both_sides_alike(text, answer, score):
    assert MATH(text, answer) == score


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 50_000,
        r"\boxed" * 50_000,
        r"\boxed\sqrt[" * 60_000,
        "{" * 300_000,
        r"\boxed{7} " * 20_000,
        r"\boxed{1}" + "\n" * 300_000 + r"so \boxed{2}",
    ],
)
def test_math_finds_boxes_in_one_pass(text):
    start = time.process_time()
    mathematics._last_boxed(text)
    assert time.process_time() - start < 5


def test_math_works_outside_the_main_thread():
    """math-verify's own limits use signal.alarm, which raises there."""
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(MATH, r"\boxed{\frac{2}{4}}", "1/2").result() == 1


PIECES = ["st", "ep 1", "\n", "step", " 2", "\n", "7"]
TEXT = "".join(PIECES)
PROMPT = Prompt(0, "q", (1,), "7", source="math", extra={"level": 3})
GRADERS = '''
def steps(text, answer, factor=1.0):
    """0.1 for each line but the last, 1 for the answer."""
    ends, spans = 0, []
    for line in text.split("\\n")[:-1]:
        spans.append([ends, ends + len(line) + 1, 0.1 * factor])
        ends += len(line) + 1
    return {"score": float(text.split("\\n")[-1] == answer), "spans": spans}

def tokens(text, answer, number=7):
    return [0.5] * number

def outside(text, answer):
    return {"spans": [[0, 999, 1.0]]}

def nothing(text, answer):
    return {"acc": 1.0}

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    score = extra_info["level"] * float(solution_str.endswith(ground_truth)) + bonus
    return {"score": score, "acc": data_source == "math"}

def plain(text, answer, extra_info):
    return float(extra_info["level"])

async def awaited(data_source, solution_str, ground_truth, extra_info=None):
    return extra_info["level"] / 2

def silent(completions, **columns):
    return [None]
'''


def response(sampled=None) -> ResponseTokens:
    return ResponseTokens(np.arange(len(PIECES)), sampled, lambda ids: "".join(PIECES[i] for i in ids))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("graders") / "my_reward.py"
    path.write_text(GRADERS)
    return path


def graded(file, name: str, args=None, tokens=response, **reward):
    entry = reward or {"grader": f"{file}:{name}", "args": args or {}}
    with RewardPool(RewardConfig(**entry, workers=1)) as pool:
        return pool.submit(PROMPT, TEXT, tokens()).result(timeout=60)


@pytest.mark.parametrize(
    ("name", "sampled", "value", "token_rewards"),
    [
        ("steps", None, 1.2, ((2, 0.1), (5, 0.1))),  # a span belongs to the token that completes it
        ("steps", [1, 1, 0, 0, 1, 0, 1], 1.2, ((1, 0.1), (4, 0.1))),  # a tool's token hands it to the one before
        ("tokens", None, 3.5, tuple((i, 0.5) for i in range(7))),
    ],
)
def test_which_tokens_get_a_reward(file, name, sampled, value, token_rewards):
    mask = None if sampled is None else np.array(sampled, bool)
    outcome = graded(file, name, tokens=lambda: response(mask))
    assert outcome.value == pytest.approx(value) and outcome.token_rewards == token_rewards


@given(st.text(st.sampled_from("ab \u00e9\u6570\U0001f600"), min_size=1, max_size=900))
def test_parts_end_where_the_text_up_to_their_last_token_does(text: str):
    """Tokens of one byte: characters are cut by them, and by the blocks that are decoded."""
    ids = np.frombuffer(text.encode(), np.uint8)

    def decode(part: np.ndarray) -> str:
        return part.tobytes().decode(errors="replace")

    ends = range(1, len(text) + 1, max(len(text) // 7, 1))
    spans = [(end, 1.0) for end in ends]
    found = ResponseTokens(ids, None, decode).rewards(spans, (), 1.0)
    lengths = [len(decode(ids[:number]).rstrip("\ufffd")) for number in range(1, len(ids))]
    assert [index for index, _ in found] == [
        next((i for i, length in enumerate(lengths) if length >= end), len(ids) - 1) for end in ends
    ]


def test_parts_end_in_tokens_that_complete_a_character():
    """The sign for an incomplete character is no character, also at the end of a response that was cut."""
    ids = np.frombuffer("ab\U0001f600cd".encode() + b"\xf0\x9f", np.uint8)
    response = ResponseTokens(ids, None, lambda part: part.tobytes().decode(errors="replace"))
    assert response.rewards([(3, 1.0), (5, 2.0), (6, 3.0)], (), 1.0) == [(5, 1.0), (7, 2.0), (9, 3.0)]


def test_a_part_ends_at_a_whole_character():
    with pytest.raises(ValueError, match=r"the span \[0, 1.5\]"):
        read_parts({"spans": [[0, 1.5, 1.0]]}, "abc")


def test_a_reward_for_every_token_takes_time_by_the_token():
    size = 2**17
    tokens = ResponseTokens(np.zeros(size), np.arange(size) % 2 > 0, lambda ids: "a" * len(ids))
    began = time.process_time()
    assert tokens.rewards((), [0.5] * size, 2.0)[:4] == [(1, 1.0), (1, 1.0), (1, 1.0), (3, 1.0)]
    assert time.process_time() - began < 4, "6 when each token looked at all"


def test_weights_and_group_graders(file):
    entries = [{"grader": f"{file}:steps", "weight": 2.0}, {"grader": "exact", "weight": 1.0}]
    outcome = graded(file, "", graders=entries)
    assert outcome.value == pytest.approx(2.4) and outcome.token_rewards == ((2, 0.2), (5, 0.2))
    none = {"grader": f"{file}:silent", "weight": 5.0}
    assert graded(file, "", graders=[none, entries[0]]) == replace(
        graded(file, "", graders=entries[:1]), detail=(said := f"{file}:silent returned None, no score"), parts=ANY
    )
    alone = graded(file, "", graders=[none, {**none, "name": "other"}])
    assert (alone.status, alone.detail) == ("error", said)
    with RewardPool(RewardConfig(grader=f"{file}:steps", group_grader="rank", workers=1)) as pool:
        first = [pool.submit(PROMPT, text, response()).result(timeout=60) for text in (TEXT, TEXT[:-1] + "8")]
        ranked = pool.submit_group(PROMPT, [TEXT, ""], first).result(timeout=60)
    assert [one.value for one in ranked] == [1.0, 0.0] and not any(one.token_rewards for one in ranked)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("outside", {}, "the span [0, 999]"),
        ("nothing", {}, "returned a dict with 'acc'"),
        ("tokens", {"number": 6}, "6 rewards of tokens for a response of 7"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_this_sample(file, name, args, message):
    outcome = graded(file, name, args)
    assert outcome.status == "error" and message in outcome.detail


def test_numbers_stay_what_they_are():
    assert read_parts(0.5, "x") == (0.5, (), ())
    assert read_parts([], "x") == ([], (), ())  # no reward for a token: no number, so an error
    with pytest.raises(ValueError, match="the reward nan of a part"):
        read_parts([float("nan")], "x")


def test_verls_compute_score_runs_as_it_is(file):
    assert graded(file, "compute_score", {"bonus": 0.5}).value == 3.5
    assert graded(file, "plain").value == 3.0
    assert graded(file, "awaited").value == 1.5
    check_grader(f"{file}:compute_score", {"bonus": 1})
    with pytest.raises(ValueError, match="did you mean 'bonus'"):
        check_grader(f"{file}:compute_score", {"bonuss": 1})


@pytest.mark.parametrize(
    "returned, value",
    [("np.isclose(1, 1)", 1.0), ("np.float32(0.5)", 0.5), ("np.int64(2)", 2.0), ("np.array(3.0)", 3.0)],
)
def test_numbers_of_numpy_are_scores(tmp_path, returned, value):
    file = tmp_path / "of_numpy.py"
    file.write_text(f"import numpy as np\ndef f(text, answer):\n    return {returned}\n")
    graded = worker.grade("grade", f"{file}:f", {}, ("a", "b", "", {}))
    assert (graded.status, graded.scores) == ("score", (value,)), graded


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("read", "repeated", "found"),
    [
        (lambda text: form.grade(f"<think>{text}", ""), "</think><answer>", 0.0),
        (lambda text: form.grade(f"{text}</answer>", ""), "</think><answer>", 1.0),
        (lambda text: sql._FENCE.sub("", f"```sql\nselect{text}1\n```"), " ", None),
        (sql._is_ordered, "[", False),
        (sql._is_ordered, "(", False),
    ],
)
def test_a_degenerate_response_takes_no_square_of_its_length(read, repeated, found):
    """The usual loop of a failing policy: 2 MB would take the better part of an hour."""
    said = read(repeated * (2_000_000 // len(repeated)))
    assert said == found if found is not None else said.startswith("select ")
