"""The environment `python`: programs between turns, what they may not do, and the answer's reward."""

import pytest

from megagrpo.rewards.sandbox.sandbox import isolation
from megagrpo.rollout.agents.built_in.python_programs import PythonPrograms

ROW = {"prompt": "17 * 23?", "answer": "391", "source": "", "extra": {}}


def block(program: str) -> str:
    return f"Let me see.\n```python\n{program}\n```\n"


def environment(**args: object) -> PythonPrograms:
    return PythonPrograms(ROW, 0, **{"grader": "math", **args})


def test_a_program_runs_and_a_turn_without_one_is_the_answer():
    played = environment()
    assert played.reset().endswith("17 * 23?") and "```python" in played.reset()
    assert played.step(block("x = 17 * 23\nprint(x)")) == ("```output\n391\n```\n", 0.0, False)
    assert played.step(r"So it is \boxed{391}.") == (None, 1.0, True)
    assert environment().step(r"\boxed{392}") == (None, 0.0, True)


@pytest.mark.parametrize(
    "program, shown",
    [
        ("print(x)", "exit code 1: NameError: name 'x' is not defined"),  # of the program before it nothing is kept
        ("print(1)\n1/0", "1\nexit code 1: ZeroDivisionError: division by zero"),
        ("while True: pass", "time limit"),
        ("x = bytearray(2**30)", "exit code 1: MemoryError"),
        ("while True: print('x' * 1000)", "output limit"),
        ("", ""),
    ],
)
def test_what_fails_is_shown_and_the_model_has_another_turn(program, shown):
    played = environment(run_s=2.0, memory_mb=128, output_kb=64, max_chars=100)
    played.step(block("x = 1"))
    said, reward, done = played.step(block(program))
    assert said.startswith("```output\n") and said.rstrip("`\n").endswith(shown)
    assert len(said) <= 100 + len("```output\n\n```\n")
    assert (reward, done) == (0.0, False)


@pytest.mark.skipif(bool(isolation()), reason=f"no namespaces here: {isolation()}")
@pytest.mark.parametrize(
    "program",
    [
        f"print(open({__file__!r}).read())",
        "import socket; print(socket.create_connection(('127.0.0.1', 22)))",
    ],
)
def test_a_program_sees_neither_files_nor_network(program):
    said, _, _ = environment().step(block(program))
    assert "exit code 1" in said and "Error" in said


@pytest.mark.parametrize(
    "args, message", [({"grader": "no_such"}, "no_such"), ({"memory": 5}, "memory"), ({"memory_mb": 1}, "64")]
)
def test_wrong_arguments_are_refused_before_the_rollout(args, message):
    with pytest.raises(ValueError, match=message):
        environment(**args)
