"""Reference answers in the forms of public data, generated: for property tests of graders."""

import json
import random
import re
from collections.abc import Iterator

MATH = r"""
#   -#   #.@   .@   #.   $#$   \frac{#}{@}   \dfrac{#}{~}   -\tfrac@@   #/~   \frac{#\pi}{@}   @\frac{1}{@}
@\sqrt{#}   \sqrt[3]{#}   \frac{#+\sqrt{#}}{@}   #\pm\sqrt{#}   \sqrt@   \{#,~\}   #, ~   (#, -#)
\left(#,\frac{1}{#}\right)   (#,#,#)   [@, ~)   (-\infty, #]   (-\infty,@)\cup(~,\infty)   x \in [@,~]
#\%   \$#.50   #^\circ   #^{\circ}   #°   #\text{ cm}^2   #\ \text{units}   # \mbox{ inches}   #,~   #{,}~
#,\!~   #\,~   @^{~}   @^@   @.# \times 10^{-#}   @e@   \frac{1}{~!}   \binom{~}{@}   @!   x^2+#x-#
y = #x + #   x=#   (x-#)(x+#)   \frac{x+#}{x-#}   #x - #y + # = 0   f(x)=#x   |x-#|
\begin{pmatrix} # & # \\ # & # \end{pmatrix}   \begin{pmatrix} # \\ -# \end{pmatrix}   \left[-#,#\right]
\text{even}   \text{Tuesday}   \text{east}   A   \text{(C)}   \mathrm{B}   @:#   @+#i   e^{@}   \ln #   \log_{2} #
\sin #^\circ   \cos\frac{\pi}{#}   #\pi   \pi   \infty   \emptyset   x < #   @ \le x \le ~   x \ge -#   ~_8
\frac{#}{~}\text{ square units}   # \text{ and } ~   #\cdot @^{#}   2\times#   0.\overline{@}
\lfloor #.5 \rfloor   \overline{AB}   \sqrt{#} - \sqrt{~}   ½   √#   a+b+#   n^@   \frac{a}{b+#}   #\text{ or }~
"""
RANGES = {"#": (2, 99), "@": (2, 9), "~": (100, 199)}  # what the signs stand for


def of_math(seed: int, each: int = 3) -> Iterator[str]:
    """As MATH, NuminaMath, DeepScaleR, AIME and OlympiadBench write them."""
    r = random.Random(seed)
    for form in [*re.split(r"   |\n", MATH.strip()), "\N{MINUS SIGN}#"]:
        for _ in range(each):
            yield re.sub(r"[#@~]", lambda sign: str(r.randint(*RANGES[sign[0]])), form)


def solution(gold: str, seed: str) -> str:
    """A gold as such, or at the end of a solution."""
    wraps = ("{}", r"So \boxed{{{}}}.", r"We get $x$; it is $\boxed{{{}}}$.", r"\[\boxed{{{}}}\]", r"\fbox{{{}}}")
    return random.Random(seed).choice(wraps).format(gold)


def of_gsm8k(seed: int) -> Iterator[str]:
    """As GSM8K and its relatives write them."""
    r = random.Random(seed)
    for _ in range(10):
        number = r.randint(1, 10**6)
        yield from (f"{number}", f"-{number}", f"{number:,}", f"${number:,}", f"{number}.", f"{number}.50")
        yield from (
            f".{number}",
            f"+{number}",
            f"She has {number - 1}+1=<<{number - 1}+1={number}>>{number}.\n#### {number:,}",
        )


def of_code(name: str, arguments: list, result: object) -> Iterator[object]:
    """As APPS, TACO, LiveCodeBench, DeepCoder, PrimeIntellect, MBPP and HumanEval write calls."""
    columns = {"fn_name": name, "inputs": [arguments], "outputs": [result]}
    lines = "\n".join(map(json.dumps, arguments))
    asserted = f"assert {name}(*{arguments!r}) == {result!r}"
    functional = {"input": lines, "output": json.dumps(result), "testtype": "functional"}
    yield columns
    yield {**columns, "outputs": [[result]]}
    yield [{**functional, "metadata": {"func_name": name}}]
    yield [{**functional, "metadata": json.dumps({"func_name": name})}]
    yield [{"input": arguments, "output": result, "type": "function_call", "fn_name": name}]
    yield {"input_output": json.dumps(columns)}
    yield [asserted]
    yield {"asserts": f"{asserted}\n{asserted}"}
    yield {"asserts": [], "input_output": [asserted]}
    yield {"asserts": f"def check(f):\n    assert f(*{arguments!r}) == {result!r}\n\ncheck({name})"}


def of_programs(given: str, shown: str) -> Iterator[object]:
    """As the same write standard input and output."""
    test = {"input": given, "output": shown}
    yield {"inputs": [given], "outputs": [shown]}
    yield {"inputs": [given.split("\n")], "outputs": [shown.split("\n")]}
    yield [{**test, "testtype": "stdin"}]
    yield [{**test, "type": "stdin_stdout"}]
    yield [[given, shown]]
    yield test
    yield {"tests": json.dumps([test])}
    yield {"input_output": json.dumps({"inputs": [given], "outputs": [shown]})}
    yield {"test_cases": [test]}


CALLS = [  # program, name, arguments, result
    ("class Solution:\n    def two_sum(self, a: List[int], t: int) -> List[int]:\n        return next([i, j] "
     "for i, j in combinations(range(len(a)), 2) if a[i] + a[j] == t)", "two_sum", [[2, 7, 11], 9], [0, 1]),
    ("def is_ok(s):\n    return s == s[::-1]", "is_ok", ["aba"], True),
    ("def none(x):\n    return None", "none", [1], None),
    ("def counts(s):\n    return dict(Counter(s))", "counts", ["aab"], {"a": 2, "b": 1}),
    ("def words(s):\n    return s.split()", "words", ["a é 'b' \"c\""], ["a", "é", "'b'", '"c"']),
    ("def nested(n):\n    return [[n]]", "nested", [1], [[1]]),
    ("def min(a):\n    return sorted(a)[0]", "min", [[3, 1]], 1),
    ("def heapq(a):\n    return 2 ** len(a)", "heapq", [[1] * 100], 2**100),
    ("from __future__ import annotations\ndef same(a): return a", "same", [1], 1),
    ("class Solution:\n    def bisect(self, a): return a", "bisect", [1], 1),
]  # fmt: skip
PROGRAMS = [  # program, standard input, standard output
    ("a, b = map(int, input().split())\nprint(a + b)", "1 2\n", "3\n"),
    ("for _ in range(int(input())): print(*sorted(map(int, input().split())))", "2\n3 1\n2 0", "1 3\n0 2\n"),
    ("print(f'{float(input()):.3f}')", "0.5\n", "0.500 "),
    ("from sys import stdin\nprint(stdin.readline().strip() or 'empty')", "\n", "empty"),
]
