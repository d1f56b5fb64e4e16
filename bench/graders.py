"""Measures how many programs a second grader `code` runs, with 1 and 2 worker processes, and what
one costs.

A trivial program with one test, and programs with 5 test cases, by standard output and by calls;
isolated where the kernel allows it. CPU milliseconds are of all processes of a program, and depend
less than the rates on what else runs.

    python bench/graders.py          # writes bench/results/graders.json and .md
"""

import argparse
import json
import os
import resource
import time

from common import provenance, write_results

from megagrpo.config.schema import RewardConfig
from megagrpo.rewards.pool import RewardPool
from megagrpo.sandbox.sandbox import isolation
from megagrpo.types import Prompt

CASES = {
    "trivial program, 1 test": ("print(2)", {"inputs": [""], "outputs": ["2"]}),
    "5 tests of standard output": (
        "print(sum(map(int, input().split())))",
        {"inputs": [f"{i} 2" for i in range(5)], "outputs": [str(i + 2) for i in range(5)]},
    ),
    "5 tests that call a function": (
        "def add(a, b): return a + b",
        {"asserts": [f"assert add({i}, 2) == {i + 2}" for i in range(5)]},
    ),
}
WORKERS = (1, 2)


def run(program: str, tests: dict, workers: int, count: int) -> tuple[float, float]:
    """Grades `count` responses by warm workers; returns the seconds, and the CPU seconds of the
    pool's whole life."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    args = {"test_s": 30.0, "total_s": 60.0}
    prompt = Prompt(0, "", (), json.dumps(tests))
    with RewardPool(
        RewardConfig(grader="code", args=args, workers=workers, timeout_s=90.0)
    ) as pool:
        for number in (2 * workers, count):  # the first ones try the sandbox
            start = time.perf_counter()
            outcomes = [
                future.result() for future in [pool.submit(prompt, program) for _ in range(number)]
            ]
            seconds = time.perf_counter() - start
            assert all(outcome.value == 1.0 for outcome in outcomes), outcomes
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100, help="responses a round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    data = {
        **provenance(),
        "isolation": isolation() or "namespaces",
        "count": args.count,
        "cases": {},
    }
    lines = []
    for name, (program, tests) in CASES.items():
        case = {}
        for workers in WORKERS:
            start_cpu_s = run(program, tests, workers, count=1)[1]
            rounds = [run(program, tests, workers, args.count) for _ in range(args.rounds)]
            case[workers] = {
                "programs_per_s": [args.count / seconds for seconds, _ in rounds],
                "cpu_ms": min(cpu_s - start_cpu_s for _, cpu_s in rounds) / (args.count - 1) * 1000,
                "load": os.getloadavg()[0],
            }
        data["cases"][name] = case
        rates = [f"{max(case[workers]['programs_per_s']):.1f}" for workers in WORKERS]
        lines.append([name, *rates, f"{min(case[workers]['cpu_ms'] for workers in WORKERS):.0f}"])
    data["load"] = [case[workers]["load"] for case in data["cases"].values() for workers in WORKERS]
    data["machine"] += f"; load {min(data['load']):.0f} to {max(data['load']):.0f} beside it"
    header = ["responses a second, best round", "1 worker", "2 workers", "CPU ms a response"]
    write_results("graders", data, header, lines)


if __name__ == "__main__":
    main()
