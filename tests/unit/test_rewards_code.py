"""Grader code: what programs score, and that hostile ones do no harm, in real sandboxes."""

import ast
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from hostile_programs import CALLS, OPTIONS, PROGRAMS, SCRIPTS, options

from megagrpo.config.schema import RewardConfig
from megagrpo.rewards.pool import RewardPool
from megagrpo.sandbox import child, sandbox
from megagrpo.sandbox.grader import grade, program_of
from megagrpo.sandbox.test_cases import read_tests
from megagrpo.types import Prompt
from tests.experiments import until

isolated = pytest.mark.skipif(bool(sandbox.isolation()), reason=f"no namespaces here: {sandbox.isolation()}")
GENEROUS = options("")
# What the interpreter has loaded before it becomes another user, who may not read the interpreter's folder.
ALSO_WITHOUT_NAMESPACES = (
    "right", "loops", "eats memory", "prints forever", "closes its output and stays", "writes a huge file",
    "opens many files", "forks without end", "leaves a daemon behind", "becomes root",
    "eats memory in System V segments",
)  # fmt: skip


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """The folder that all sandboxes of a test have theirs in; afterwards no file and no process of one is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    os.chmod(tmp_path, 0o755)
    yield tmp_path
    assert not list(tmp_path.iterdir())
    assert not survivors(str(tmp_path))


def survivors(folder: str) -> list[psutil.Process]:
    """Processes that run a program of a sandbox in `folder`."""
    commands = ((process, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"]))
    return [process for process, command in commands if folder in command and "sandbox/child.py" in command]


@pytest.mark.verifies(
    "algorithms", "hostile programs and services", "unit/test_rewards_services.py", see="[tables](hostile.md)"
)
@isolated
@pytest.mark.parametrize("name", PROGRAMS)
def test_whatever_a_program_does_is_its_outcome_and_leaves_nothing(name, scratch):
    tests, program, score, detail = PROGRAMS[name]
    got, said = grade(f"```python\n{program}\n```", tests, **options(detail))
    assert got == score and detail in said, (got, said)


@pytest.mark.parametrize("name", ALSO_WITHOUT_NAMESPACES)
def test_limits_hold_without_namespaces(name):
    """If the kernel allows none. The folder is the system's own: another user must be able to enter it."""
    tests, program, _, detail = PROGRAMS[name]
    assert tests is SCRIPTS
    settings = {"open_files": 16, "processes": 6, "memory_mb": 192, "output_kb": 64, "disk_mb": 4}
    limits = sandbox.Limits(wall_s=0.7 if detail == "time limit" else 20.0, **settings)
    ended = sandbox.run_program(program, b"1\n", limits, isolate=False)
    assert detail in ended.problem
    if not detail:
        assert ended.stdout == b"2\n"
    below = psutil.Process()
    until(lambda: not [p for p in below.children(True) if "sandbox/child.py" in str(p.cmdline())], 5)


# Python runs it first in every process: a kernel that grants no namespaces.
NO_NAMESPACES = """import ctypes
real = ctypes.CDLL(None, use_errno=True)

class Refusing:
    def __getattr__(self, name):
        return (lambda *flags: -1) if name == "unshare" else getattr(real, name)

ctypes.CDLL = lambda *args, **kwargs: Refusing()
"""
WITHOUT = """import sys
from megagrpo.config.schema import RewardConfig
from megagrpo.rewards.pool import RewardPool
from megagrpo.sandbox import sandbox
from megagrpo.types import Prompt

sandbox._CHILD = sys.argv[1]
config = RewardConfig(grader="code", args={"isolation": sys.argv[2], "total_s": 20.0}, workers=1, timeout_s=60.0)
with RewardPool(config) as pool:
    pass
print("started")
"""


def test_without_namespaces_nothing_starts_unless_isolation_is_off(tmp_path):
    """The supervisor's `unshare` fails, as in a container without privileges."""
    child = Path(sandbox.__file__).with_name("child.py").read_text()
    os.chmod(tmp_path, 0o755)
    (tmp_path / "child.py").write_text(NO_NAMESPACES + child)

    def started(wish: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", WITHOUT, str(tmp_path / "child.py"), wish]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    refused = started("required")
    assert refused.returncode == 1
    said = refused.stderr.strip().splitlines()[-1]
    assert said.startswith("ValueError: grader code: programs cannot be isolated here")
    assert "user namespaces" in said and "isolation: off" in said
    within_limits = started("off")
    assert within_limits.stdout == "started\n", within_limits.stderr


# Python runs it first: root without CAP_SYS_ADMIN, as in most containers.
NO_ADMIN = """import ctypes, os
real = ctypes.CDLL(None, use_errno=True)

class Refusing:
    def __getattr__(self, name):
        call = getattr(real, name)
        return (lambda flags: -1 if os.getuid() == 0 else call(flags)) if name == "unshare" else call

ctypes.CDLL = lambda *args, **kwargs: Refusing()
"""


@isolated
@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_root_without_the_capability_is_isolated_as_another_user(monkeypatch):
    """The folder of the sources is the system's own, which another user can enter; that of programs is closed
    to others, as in a grader's process. He may not read the interpreter's."""
    ours = Path(sandbox.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        for name in ("calls.py", "system_calls.py"):
            shutil.copy(ours / name, folder)
        (Path(folder) / "child.py").write_text(NO_ADMIN + (ours / "child.py").read_text())
        folders, links = sandbox.system_paths()
        monkeypatch.setattr(sandbox, "_CHILD", Path(folder) / "child.py")
        monkeypatch.setattr(sandbox, "system_paths", lambda: ([f for f in folders if f in sandbox._SYSTEM], links))
        limits = sandbox.Limits(20.0, 192, 64, 4, 16, 6)
        closed = Path(folder) / "closed"
        closed.mkdir(0o700)
        monkeypatch.setattr(tempfile, "tempdir", str(closed))
        ended = sandbox.run_program(
            "import os\nprint(61000 <= os.getuid() < 65000, os.listdir('/tmp'))", b"", limits, True
        )
    assert (ended.problem, ended.stdout) == ("", b"True []\n")


@isolated
def test_an_interpreter_in_the_folder_of_temporary_files(scratch, monkeypatch):
    folders, links = sandbox.system_paths()
    monkeypatch.setattr(sandbox, "system_paths", lambda: ([*folders, str(scratch)], links))
    limits = sandbox.Limits(20.0, 192, 64, 4, 16, 6)
    assert sandbox.run_program("import re", b"", limits, isolate=True).problem == ""


def test_the_expected_results_are_in_no_file_while_programs_run(scratch):
    with sandbox.Sandbox("script", "import time\ntime.sleep(1000)", sandbox.Limits(20.0, 192, 64, 4, 16, 6), False):
        until(lambda: list(scratch.glob("*/root")), 20)
        assert not list(scratch.glob("*/program.py"))


@isolated
def test_a_program_sees_no_environment_and_no_other_process(scratch, monkeypatch):
    monkeypatch.setenv("SECRET_OF_TEST", "hunter2")
    program = """
import os
print(sorted(os.environ), [name for name in os.listdir("/proc") if name.isdigit()], os.getcwd(), os.listdir("."))
"""
    limits = sandbox.Limits(20.0, 192, 64, 4, 16, 6)
    ended = sandbox.run_program(program, b"", limits, isolate=True)
    assert ended.stdout.decode().split("]", 1)[1] == " ['1'] /tmp []\n" and b"SECRET" not in ended.stdout


@isolated
def test_a_killed_worker_takes_its_program_along(scratch):
    """As when the pool kills a worker at its own limit: only its supervisor can still end the program."""
    pid = os.fork()
    if pid == 0:
        try:
            sandbox.run_program("import time\ntime.sleep(1000)", b"", sandbox.Limits(1000.0, 192, 64, 4, 16, 6), True)
        finally:
            os._exit(0)
    until(lambda: len(survivors(str(scratch))) == 2, 30)  # a supervisor and its program
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    until(lambda: not survivors(str(scratch)), 30)
    for folder in scratch.iterdir():  # the pool removes these with the worker's folder
        shutil.rmtree(folder)


THIRDS = json.dumps({"inputs": ["", ""], "outputs": ["0.333333", "1"]})
THIRD_OF_CALL = json.dumps({"fn_name": "f", "inputs": [[]], "outputs": [[0.333333]]})
STACK = """class Stack:
    def __init__(self): self.x = []
    def push(self, x): self.x.append(x)
    def pop(self): return self.x.pop()
def s(): return Stack()
"""


ACCOUNT = """class Account:
    def add(self, x): self.total += x
    def __str__(self): return f"{self.total} $"
"""
SETS = "a = Account()\na.total = 50\na.add(10)\nassert a.total == 60\nassert str(a) == '60 $'"


RAISES = """class Bad(ValueError): pass
def f(x):
    if x == 4: raise StopIteration
    if x == 5: raise EOFError("the program ended")
    raise {1: KeyError("no"), 2: Bad("low"), 3: UnicodeDecodeError("utf-8", b"x", 0, 1, "odd")}[x]
"""
EXPECTS = [
    "try: f(1)\nexcept KeyError: pass\nelse: assert False",
    "try: f(2)\nexcept ValueError as e: assert str(e) == 'low'\nelse: assert False",
    "try: f(3)\nexcept UnicodeError: assert False\nexcept ValueError: pass",
]
NOT_AS_IF_RIGHT = ["assert all(map(f, [4]))", "try: f(1)\nexcept ValueError: pass", "f(5)", "f(2)"]


@isolated
@pytest.mark.parametrize(
    "program, answer, score, more",
    [
        ("print(sum(map(int, input().split())))", {"inputs": ["1 2", "3 4\n"], "outputs": ["3  \n\n", "8"]}, 0.5, {}),
        ("print(input() + input())", {"inputs": [["a", "b"]], "outputs": [["ab"]]}, 1.0, {}),
        ("def add(a, b): return (a, b)", {"fn_name": "add", "inputs": [[1, [2]]], "outputs": [[1, [2]]]}, 1.0, {}),
        ("def f(a): return a", {"fn_name": "f", "inputs": ['"\u2028\x85"'], "outputs": ['"\u2028\x85"']}, 1.0, {}),
        ("def f(): return 7", {"fn_name": "f", "inputs": ["", "\n"], "outputs": ["7", "7"]}, 1.0, {}),
        ("def f(a): return a + 1", {"fn_name": "f", "inputs": ["9" * 5000], "outputs": ["1" + "0" * 5000]}, 1.0, {}),
        ("print(__file__)", {"inputs": [""], "outputs": ["program.py"]}, 1.0, {}),
        ("class Solution:\n def g(_, a): return a + 1", {"fn_name": "g", "inputs": ["1"], "outputs": ["2"]}, 1.0, {}),
        (STACK, ["x = s()\nx.push((1, {2}))\nassert x.pop() == (1, {2})"], 1.0, {}),
        ("def f(x): return iter([x])", {"asserts": ["assert list(f(1)) == [1]", "assert next(f(1)) == 1"]}, 0.5, {}),
        ("def h(x): return x + 1", ["def check(g):\n assert g(1) == 2\ncheck(h)", "assert math.sqrt(h(3))==2"], 1, {}),
        ("def f(x): return 1 / x", {"asserts": ["assert f(0) == 0", "assert f(1) == 1"]}, 0.5, {}),
        (ACCOUNT, SETS, 1.0, {}),
        (ACCOUNT.replace("+=", "-="), SETS, (0.0, "test 1 of 1: a wrong result"), {}),
        ("def f(): return 2", "try: import numpy\nexcept ImportError: pass\nassert f() == 2", 1.0, {}),
        ("def f(): return 2", "if __name__ == '__main__':\n assert f() == 3", 0.0, {}),
        (RAISES, EXPECTS, 1.0, {}),
        (RAISES, NOT_AS_IF_RIGHT, 0.0, {}),
        (RAISES, NOT_AS_IF_RIGHT[:1], (0.0, "test 1 of 1: StopIteration: "), {}),
        (RAISES, NOT_AS_IF_RIGHT[2:], (0.0, "test 1 of 2: EOFError: the program ended"), {}),
        (RAISES, NOT_AS_IF_RIGHT[3:], (0.0, "test 1 of 1: ValueError: low"), {}),
        ("syntax error", {"asserts": ["assert f(0) == 0"]}, 0.0, {}),
        ("print(1/3)", THIRDS, 0.0, {"tolerance": 0}),
        ("print(1/3)", THIRDS, 0.5, {"tolerance": 1e-5}),
        ("print(1/3)", THIRDS, (0.0, "test 2 of 2: wrong output"), {"tolerance": 1e-5, "score": "all"}),
        ("def f(): return [1/3]", THIRD_OF_CALL, 1.0, {}),
        ("def f(): return [1/3]", THIRD_OF_CALL, 0.0, {"tolerance": 1e-7}),
        # a parameter, or a name of a scope, that is called as the tested function is
        ("def h(x): return x + 1", ["def check(h):\n assert h(1) == 2\ncheck(h)"], 1.0, {}),
        ("def h(x): return x + 1", ["assert [h(h) for h in (h,)] == []", "assert h(1) == 2"], 0.5, {}),
        ("def h(x): return x + 1", ["y = 1\ndef check():\n h = 3\n assert h == 3\ncheck()\nassert h(y) == 2"], 1, {}),
    ],
)  # fmt: skip
def test_forms_of_test_cases_and_options_of_scoring(program, answer, score, more, scratch):
    found = grade(program, answer if isinstance(answer, str) else json.dumps(answer), **GENEROUS, **more)
    assert score in (found, found[0])


def script(program: str, stdin: str, stdout: str) -> tuple[str, dict]:
    return program, {"inputs": [stdin], "outputs": [stdout]}


def function(program: str, argument: object, result: object) -> tuple[str, dict]:
    return f"def f(a):\n    {program}", {"fn_name": "f", "inputs": [[argument]], "outputs": [result]}


ADDS = "print(sum(map(int, {}.split())))"
DEEP = """import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(2**26)
def f(n): return 0 if n == 0 else 1 + f(n - 1)
t = threading.Thread(target=lambda: print(f(int(input()))))
t.start(); t.join()"""
# Right for judges that contestants use, by NVIDIA-NeMo/Gym 2956, lighteval 1255, DMOJ judge-server 222 and their like.
RIGHT = {
    "sys.stdin.buffer": script("import sys\n" + ADDS.format("sys.stdin.buffer.read()"), "1 2\n", "3"),
    "open(0)": script(ADDS.format("open(0).read()"), "1 2\n", "3"),
    "os.read(0)": script("import os\n" + ADDS.format("os.read(0, 100)"), "1 2\n", "3"),
    "/dev/stdin": script(ADDS.format("open('/dev/stdin').read()"), "1 2\n", "3"),
    "stdout.buffer": script("import sys\nsys.stdout.buffer.write(b'3\\n')", "", "3"),
    "exit()": script("print(3)\nexit()", "", "3"),
    "exit(0) in a function": script("def main():\n    print(3)\n    exit(0)\nmain()", "", "3"),
    "quit()": script("print(3)\nquit()", "", "3"),
    "main guard": script("if __name__ == '__main__':\n    print(3)", "", "3"),
    "deep recursion in a thread": script(DEEP, "20000", "20000"),
    "writes 10,000 digits": script("print(10**int(input()))", "10000", "1" + "0" * 10000),
    "reads 5,000 digits": script("print(int(input()) + 1)", "9" * 5000, "1" + "0" * 5000),
    "fewer decimals": script("print('%.6f' % (1 / 3))", "", "0.333333333333"),
    "a float for an integer": script("print(4 / 2)", "", "2"),
    "an exponent": script("print(0.00001)", "", "0.00001"),
    "no point before decimals": script("print('.5 5.')", "", "0.5 5"),
    "rounded away from an integer": script("print(0.1 + 0.2 + 0.7)", "", "1"),
    "large float": script("print(1e15 / 3)", "", "333333333333333.0"),
    "white space": script("print(' 1  2\\n\\n3')", "", "1 2\n3\n"),
    "lines of Windows": script("print('a')\nprint('b')", "", "a\r\nb\r\n"),
    "no imports": script(
        "h = [3, 1]\nheapify(h)\nprint(heapq.heappop(h), bisect.bisect([1], 1), sqrt(4))", "", "1 1 2.0"
    ),
    "math's pow is not Python's": script("print(pow(2, 10, 7))", "", "2"),
    "in place": function("a.reverse()", [1, 2, 3], [3, 2, 1]),
    "in place, nothing to do": function("a.sort()", [1, 2], [1, 2]),
    "no result": function("a.clear()", [1, 2], None),
    "range": function("return range(a)", 3, [0, 1, 2]),
    "generator": function("yield from a", [1, 2], [1, 2]),
    "keys": function("return dict.fromkeys(a).keys()", [1, 2], [1, 2]),
    "deque": function("return deque(a)", [1, 2], [1, 2]),
    "set": function("return set(a)", [1, 2], [2, 1]),
    "set of tuples": function("return {(x, x) for x in a}", [1, 2], [[2, 2], [1, 1]]),
    "float": function("return a / 3", 1, 0.333333),
    "integral float": function("return a / 1", 2**53, 2**53),
    "5,000 digits": function("return [10**a - 10**a + 1, str(10**a)]", 5000, [1, "1" + "0" * 5000]),
    "deep recursion": function("return a and 1 + f(a - 1)", 5000, 5000),
    "deep recursion of a script": script("f = lambda n: n and 1 + f(n - 1)\nprint(f(5000))", "", "5000"),
    "infinity": function("return a * math.inf", 1, math.inf),
    "exit in a function": function("print('x') or exit()\ndef f(a): return a", 1, 1),
}
REPLIES = """import os
    for fd in range(3, 64):
        try: os.write(fd, b'{}\\n')
        except OSError: pass"""
GUESSES = REPLIES.format('["ok", {{"list": [{}]}}]')
WRONG = {
    "another count": script("print(1000000008)", "", "1000000007"),
    "a float near a large count": script("print(1e15 + 1)", "", "1000000000000000"),
    "another float": script("print(0.3334)", "", "0.3333"),
    "binary digits": script("print(11)", "", "0011"),
    "underscores": script("print('1_0')", "", "10"),
    "other digits": script("print('\u0663')", "", "3"),
    "a word more": script("print('1 2')", "", "1"),
    "joined words": script("print('12')", "", "1 2"),
    "an immense exponent": script("print('1e999999999')", "", "1.0"),
    "case": script("print('Yes')", "", "YES"),
    "nan": script("print('nan')", "", "1.0"),
    "lines in another order": script("print('b\\na')", "", "a\nb"),
    "a failure after the answer": script("print(3)\nexit(1)", "", "3"),
    "returns what it does not change": function("return None", [2, 1], [1, 2]),
    "a set with fewer": function("return set(a)", [1, 1], [1, 1]),
    "a generator without end": function("while True: yield 1", 1, [1]),
    "a text": function("return str(a)", 1, 1),
    "none": function("return None", 1, 2),
    "a large integer": function("return a + 1", 10**9, 10**9),
    "many guesses": function(GUESSES.format("0, 1, 2"), 1, 2),
    "guesses of the argument": function(GUESSES.format("null, 0, 1, 2"), [1], 2),
    "a number for infinity": function("return 3\ninf = float('inf')", 1, math.inf),
    "an error without words": function(REPLIES.format('["error", ""]'), 1, 2),
    "a large float": function("return a * 1.0 + 1", 10**15, 10**15),
}


@isolated
@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_programs_are_judged_as_elsewhere(name):
    program, answer = (RIGHT | WRONG)[name]
    found = grade(program, json.dumps(answer), test_s=20.0, total_s=1.0 if "without end" in name else 60.0)
    assert found[0] == (name in RIGHT), found


@isolated
def test_all_tests_share_one_time(scratch):
    tests = json.dumps({"inputs": [""] * 4, "outputs": [""] * 4})
    start = time.monotonic()
    score, said = grade("import time\ntime.sleep(1000)", tests, **OPTIONS | {"test_s": 60.0, "total_s": 0.6})
    assert score == 0.0 and said == "test 1 of 4: time limit" and time.monotonic() - start < 20


@isolated
def test_a_sandbox_that_cannot_start_leaves_nothing_open(tmp_path, monkeypatch):
    assert grade("def f(x): return x", CALLS, **GENEROUS)[0] == 0.0
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))  # as on a disk that is full
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            grade("def f(x): return x", CALLS, **GENEROUS)
    assert len(os.listdir("/proc/self/fd")) == before


def test_programs_at_the_same_time_have_other_user_ids():
    first, claim = child._claim_user()
    second, other = child._claim_user()
    assert first != second
    claim.close()
    third, again = child._claim_user()
    assert third == first
    other.close()
    again.close()


@pytest.mark.parametrize(
    "text, program",
    [
        ("x = 1", "x = 1"),
        ("so:\n```python\na\n```\nor\n```py\nb\n```\n```\nc\n```", "b\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```cpp\nint x;\n```", "int x;\n"),
        ("```python\ncut off", "cut off"),
        ("1. so:\n   ```python\n   a:\n       b\n\n   ```\n", "a:\n    b\n\n"),  # in a list
        (" ```python\na:\n    b\n```", "a:\n    b\n"),
        ("  ```python\n\n  a\n  ```", "\na\n"),
    ],
)
def test_the_last_python_block_is_the_program(text, program):
    assert program_of(text, "") == program


SOLUTION = "class Solution:\n    def f(self, a): return a"


@pytest.mark.parametrize("example", ["print(f(2))", "assert Solution().f(2) == 2", "def main(): print(f(2))"])
@pytest.mark.parametrize("solution", [SOLUTION, "def f(a): return a"])
def test_an_example_behind_a_solution_is_not_the_program(solution, example):
    text = f"```python\ndef f(a): return 0\n```\nBetter:\n```python\n{solution}\n```\nTest:\n```python\n{example}\n```"
    assert program_of(text, "") == f"{example}\n" and program_of(text, "def f") == f"{solution}\n"
    assert program_of(text, "def other") == f"{example}\n", "which imports it, or fails"
    text += "\n```python\nclass Node: pass\n```"
    assert program_of(f"```python\nclass Node: 1\n\ndef f(a): 2\n```\n{text}", "def f|class Node").startswith(
        "class Node: 1"
    )


@isolated
@pytest.mark.parametrize("answer", [{"fn_name": "f", "inputs": [[2]], "outputs": [4]}, ["assert f(2) == 4"]])
@pytest.mark.parametrize("example", ["def format_it(): print(f(2))", "def test_f(): assert f(2) == 4"])
def test_functions_of_an_example_are_not_the_tested_one(answer, example):
    text = f"```python\ndef f(a): return 2 * a\n```\nTest:\n```python\n{example}\n```"
    assert grade(text, json.dumps(answer), **GENEROUS) == (1.0, "")


@isolated
def test_the_program_of_a_called_test_defines_its_function():
    text = f"```python\n{SOLUTION}\n```\n```python\nprint(Solution().f(7))\n```"
    answer = json.dumps({"fn_name": "f", "inputs": [[2]], "outputs": [2]})
    assert grade(text, answer, **GENEROUS) == grade(text, '["assert f(2) == 2"]', **GENEROUS) == (1.0, "")


@pytest.mark.parametrize(
    "with_nulls, plain",
    [
        ({"test_cases": None, "inputs": None, "outputs": None, "asserts": ["assert f()"]}, ["assert f()"]),
        (
            [{"input": "1", "output": "2", "testtype": None, "type": "function_call", "fn_name": "f"}],
            {"fn_name": "f", "inputs": [[1]], "outputs": [2]},
        ),
        (
            {"input": [1], "output": None, "testtype": None, "fn_name": "f"},
            {"fn_name": "f", "inputs": [[1]], "outputs": [None]},
        ),
    ],
)
def test_a_null_key_of_tests_is_one_that_they_lack(with_nulls, plain):
    """JSON lines that were Parquet have the keys of other rows, too; an expected null stays."""
    assert read_tests(json.dumps(with_nulls)) == read_tests(json.dumps(plain))


@pytest.mark.parametrize(
    "answer, said",
    [
        ("72", "should be a list with at least one test"),
        ("[]", "at least one test"),
        ('[""]', "asserts nothing"),
        ('["x = 1"]', "asserts nothing"),
        ("def test_f():\n assert f() == 1", "only in functions that it does not call"),
        ("def check(candidate):\n assert candidate() == 1", "asserts nothing"),
        ("import random\nrandom.seed(0)\ndef test_f():\n assert f() == 1", "asserts nothing"),
        ("class Tests(unittest.TestCase):\n def test_f(self): assert f() == 1\nunittest.main()", "asserts nothing"),
        ("import numpy as np\nassert f() == np.pi", "imports numpy; only Python's own modules"),
        ("import math, numpy as np\nassert f() == np.pi", "imports numpy"),
        ("def check(f):\n import numpy\n assert f() == 1\ncheck(f)", "imports numpy"),
        ("from . import g\nassert f() == 1", "imports ."),
        ("from solution import f\nassert f() == 1", "imports solution"),
        ("[null]", "an object with input and output"),
        ("[1, 2]", "an object with input and output"),
        ('{"asserts": [{"code": "assert f()"}]}', 'no "input" and "output"'),
        ('[{"input": "1", "output": "1", "testtype": "functional"}]', "names no function"),
        (
            '[{"input": "1", "output": "1"}, {"input": "1", "output": "1", "fn_name": "f"}]',
            "mix calls and standard input",
        ),
        ('{"inputs": ["1"], "outputs": ["1"], "fn_name": "f g"}', "the name of a function"),
        ("x", "not JSON with test cases"),
        ('{"inputs": ["1"], "outputs": []}', '"outputs" of the answer should be a list with at least one entry'),
        ('{"inputs": ["1"], "outputs": ["1", "2"]}', "1 inputs and 2 outputs"),
        ('{"asserts": ["assert f(1 =="]}', "is not Python"),
        ('{"inputs": [1], "outputs": [2]}', "texts or lists of lines"),
        ('{"inputs": [1], "outputs": [2], "fn_name": "f"}', "a list of arguments"),
    ],
)
def test_an_answer_without_tests_is_an_error_and_not_a_wrong_program(answer, said):
    with pytest.raises(ValueError, match=said):
        read_tests(answer)


@isolated
@pytest.mark.parametrize("score", ["all", "fraction"])
def test_tests_that_cannot_start_are_no_wrong_answer(score, monkeypatch):
    start = sandbox._start_supervisor

    def started(options: dict, limits: sandbox.Limits, fds: list[int]) -> subprocess.Popen:
        disk_mb = -1 if options["mode"] == "test" else limits.disk_mb
        return start(options, dataclasses.replace(limits, disk_mb=disk_mb), fds)

    monkeypatch.setattr(sandbox, "_start_supervisor", started)
    with pytest.raises(sandbox.SandboxError, match="mount"):
        grade("def f(x): return x", CALLS, **GENEROUS | {"score": score})


def test_a_machine_without_room_for_a_while_can_isolate_later(monkeypatch):
    ends = iter([sandbox.Ended("time limit", -9, b"", b""), sandbox.Ended("", 0, b"", b"")])
    monkeypatch.setattr(sandbox, "run_program", lambda *args, **kwargs: next(ends))
    assert sandbox.isolation() == "time limit" and sandbox.isolation() == ""


def test_the_numbers_of_a_call_are_no_source_of_python():
    answer = {"fn_name": "f", "inputs": [[list(range(10_000))]], "outputs": [list(range(10_000))]}
    (statement,) = read_tests(json.dumps(answer)).statements
    assert len(list(ast.walk(ast.parse(statement)))) < 20


def test_assertions_need_no_json():
    assert read_tests("assert add(1, 2) == 3").statements == ("assert add(1, 2) == 3",)


@isolated
@pytest.mark.parametrize("name", ["sum", "bisect", "gcd"])
def test_a_function_that_the_program_lacks_is_not_found_elsewhere(name):
    inputs = {"sum": [[1, 2]], "bisect": [[1, 2], 1], "gcd": [4, 6]}[name]
    output = {"sum": 3, "bisect": 1, "gcd": 2}[name]
    answer = json.dumps({"inputs": [inputs], "outputs": [output], "fn_name": name})
    assert grade("x = 1", answer, **GENEROUS)[0] == 0.0


@isolated
def test_an_assertion_may_call_a_program_that_is_named_as_a_module():
    assert grade("def bisect(a): return a", '["assert bisect(3) == 3"]', **GENEROUS) == (1.0, "")


@pytest.mark.parametrize("text", ["```" * 200_000, "```x" * 200_000, "``` " * 200_000 + "\n"])
def test_a_response_of_fences_is_read_at_once(text):
    start = time.process_time()
    program_of(text, "")
    assert time.process_time() - start < 5


@isolated
def test_code_in_the_pool():
    config = RewardConfig(grader="code", args=OPTIONS | {"test_s": 20.0, "total_s": 20.0}, workers=1, timeout_s=60.0)
    with RewardPool(config) as pool:
        prompts = [Prompt(0, "", (1,), answer) for answer in (SCRIPTS, CALLS, "no tests")]
        right, wrong, broken = (pool.submit(p, "print(int(input()) + 1)").result(timeout=120) for p in prompts)
    assert (right.status, right.value, right.detail) == ("score", 1.0, "")
    assert wrong.status == "score" and wrong.value == 0.0 and "test 1 of 2" in wrong.detail
    assert broken.status == "error" and "not JSON" in broken.detail
