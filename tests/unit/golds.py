"""Reference answers in the forms of public data, generated: for property tests of graders."""

import json
import random
from collections.abc import Iterator


def of_math(seed: int, each: int = 3) -> Iterator[str]:
    """As MATH, NuminaMath, DeepScaleR, AIME and OlympiadBench write them."""
    r = random.Random(seed)

    def n(low: int = 1, high: int = 99) -> int:
        return r.randint(low, high)

    forms = [
        lambda:str(n()), lambda:f"-{n()}", lambda:f"{n()}.{n(1,9)}", lambda:f".{n(1,9)}", lambda:f"{n()}.", lambda:f"${n()}$",
        lambda:f"\\frac{{{n()}}}{{{n(2)}}}", lambda:f"\\dfrac{{{n()}}}{{{n(2)}}}", lambda:f"-\\tfrac{n(1,9)}{n(2,9)}", lambda:f"{n()}/{n(2)}", lambda:f"\\frac{{{n()}\\pi}}{{{n(2)}}}",
        lambda:f"{n()}\\frac{{1}}{{{n(2,9)}}}", lambda:f"{n(2,9)}\\sqrt{{{n(2)}}}", lambda:f"\\sqrt[3]{{{n(2)}}}", lambda:f"\\frac{{{n()}+\\sqrt{{{n(2)}}}}}{{{n(2,9)}}}", lambda:f"{n()}\\pm\\sqrt{{{n(2)}}}", lambda: f"\\sqrt{n(2,9)}",
        lambda:f"\\{{{n()},{n(100,200)}\\}}", lambda:f"{n()}, {n(100,200)}", lambda:f"({n()}, -{n()})", lambda:f"\\left({n()},\\frac{{1}}{{{n(2)}}}\\right)", lambda:f"({n()},{n()},{n()})",
        lambda:f"[{n(1,9)}, {n(10,99)})", lambda:f"(-\\infty, {n()}]", lambda:f"(-\\infty,{n(1,9)})\\cup({n(10,99)},\\infty)", lambda:f"x \\in [{n(1,9)},{n(10,99)}]",
        lambda:f"{n()}\\%", lambda:f"\\${n()}.50", lambda:f"{n()}^\\circ", lambda:f"{n()}^{{\\circ}}", lambda:f"{n()}°", lambda:f"{n()}\\text{{ cm}}^2", lambda:f"{n()}\\ \\text{{units}}", lambda:f"{n()} \\mbox{{ inches}}",
        lambda:f"{n()},{n(100,999)}", lambda:f"{n()}{{,}}{n(100,999)}", lambda:f"{n()},\\!{n(100,999)}", lambda:f"{n()}\\,{n(100,999)}",
        lambda:f"{n(2,9)}^{{{n(10,200)}}}", lambda:f"{n(2,9)}^{n(2,9)}", lambda:f"{n(1,9)}.{n()} \\times 10^{{-{n(2,30)}}}", lambda:f"{n(1,9)}e{n(2,9)}", lambda:f"\\frac{{1}}{{{n(5,300)}!}}", lambda:f"\\binom{{{n(10,20)}}}{{{n(1,9)}}}", lambda:f"{n(3,12)}!",
        lambda:f"x^2+{n()}x-{n()}", lambda:f"y = {n(2)}x + {n()}", lambda:f"x={n()}", lambda:f"(x-{n()})(x+{n()})", lambda:f"\\frac{{x+{n()}}}{{x-{n()}}}", lambda:f"{n(2)}x - {n(2)}y + {n()} = 0", lambda:f"f(x)={n(2)}x",
        lambda:f"\\begin{{pmatrix}} {n()} & {n()} \\\\ {n()} & {n()} \\end{{pmatrix}}", lambda:f"\\begin{{pmatrix}} {n()} \\\\ -{n()} \\end{{pmatrix}}",
        lambda:f"\\text{{{r.choice(['even','odd','Tuesday','yes','east','Navin'])}}}", lambda:r.choice("ABCDE"), lambda:f"\\text{{({r.choice('ABCDE')})}}", lambda:f"\\mathrm{{{r.choice('ABCDE')}}}",
        lambda:f"{n(2,9)}:{n(10,59)}", lambda:f"{n()}:{n()}", lambda:f"{n(1,9)}+{n()}i", lambda:f"e^{{{n(2,9)}}}", lambda:f"\\ln {n(2)}", lambda:f"\\log_{{2}} {n(3)}", lambda:f"\\sin {n()}^\\circ", lambda:f"\\cos\\frac{{\\pi}}{{{n(3)}}}", lambda:f"{n()}\\pi", lambda:"\\pi", lambda:"\\infty", lambda:"\\emptyset",
        lambda:f"x < {n()}", lambda:f"{n(1,9)} \\le x \\le {n(10,99)}", lambda:f"x \\ge -{n()}", lambda:f"{n()}_{{{n(4,9)}}}", lambda:f"{n(100,777)}_8", lambda:f"\\frac{{{n()}}}{{{n(2)}}}\\text{{ square units}}", lambda:f"\\left[-{n()},{n()}\\right]", lambda:f"|x-{n()}|", lambda:f"{n()} \\text{{ and }} {n(100,200)}", lambda:f"{n()}\\cdot {n(2,9)}^{{{n(10,99)}}}", lambda:f"2\\times{n()}", lambda:f"0.\\overline{{{n(1,9)}}}", lambda:f"\\lfloor {n()}.5 \\rfloor", lambda:"\\overline{AB}", lambda:f"\\sqrt{{{n(2)}}} - \\sqrt{{{n(2)}}}", lambda:"½",lambda:f"√{n(2)}",lambda:f"−{n()}", lambda:f"a+b+{n()}", lambda:f"n^{n(2,9)}", lambda: f"\\frac{{a}}{{b+{n()}}}", lambda:f"{n()}\\text{{ or }}{n(100,200)}", lambda: f"p - q + {n()}",
    ]  # fmt: skip
    for form in forms:
        for _ in range(each):
            yield form()


def solution(gold: str, seed: str) -> str:
    """A gold as such, or at the end of a solution."""
    wraps = (
        "{}",
        r"So \boxed{{{}}}.",
        r"We get $x$; it is $\boxed{{{}}}$.",
        r"\[\boxed{{{}}}\]",
        r"\fbox{{{}}}",
    )
    return random.Random(seed).choice(wraps).format(gold)


def of_gsm8k(seed: int) -> Iterator[str]:
    """As GSM8K and its relatives write them."""
    r = random.Random(seed)
    for _ in range(10):
        number = r.randint(1, 10**6)
        yield from (
            f"{number}",
            f"-{number}",
            f"{number:,}",
            f"${number:,}",
            f"{number}.",
            f"{number}.50",
        )
        yield from (
            f".{number}",
            f"+{number}",
            f"She has {number - 1}+1=<<{number - 1}+1={number}>>{number}.\n#### {number:,}",
        )


def of_code(name: str, arguments: list, result: object) -> Iterator[object]:
    """As APPS, TACO, LiveCodeBench, DeepCoder, PrimeIntellect, MBPP and HumanEval write calls."""
    columns = {"fn_name": name, "inputs": [arguments], "outputs": [result]}
    lines = "\n".join(map(json.dumps, arguments))
    functional = {"input": lines, "output": json.dumps(result), "testtype": "functional"}
    yield columns
    yield {**columns, "outputs": [[result]]}
    yield [{**functional, "metadata": {"func_name": name}}]
    yield [{"input": arguments, "output": result, "type": "function_call", "fn_name": name}]
    yield {"input_output": json.dumps(columns)}
    yield [f"assert {name}(*{arguments!r}) == {result!r}"]
    yield {"asserts": f"def check(f):\n    assert f(*{arguments!r}) == {result!r}\n\ncheck({name})"}


def of_programs(given: str, shown: str) -> Iterator[object]:
    """As the same write standard input and output."""
    test = {"input": given, "output": shown}
    yield {"inputs": [given], "outputs": [shown]}
    yield {"inputs": [given.split("\n")], "outputs": [shown.split("\n")]}
    yield [{**test, "testtype": "stdin"}]
    yield [{**test, "type": "stdin_stdout"}]
    yield [[given, shown]]
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
]  # fmt: skip
PROGRAMS = [  # program, standard input, standard output
    ("a, b = map(int, input().split())\nprint(a + b)", "1 2\n", "3\n"),
    (
        "for _ in range(int(input())): print(*sorted(map(int, input().split())))",
        "2\n3 1\n2 0",
        "1 3\n0 2\n",
    ),
    ("print(f'{float(input()):.3f}')", "0.5\n", "0.500 "),
    ("from sys import stdin\nprint(stdin.readline().strip() or 'empty')", "\n", "empty"),
]
