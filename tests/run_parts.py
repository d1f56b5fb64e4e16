"""Runs all tests in parts: the unit tests on every core, then the others two at a time, as most
wait for processes.

usage: python tests/run_parts.py [--record] [pytest arguments]
Exits with 1 and names the parts that failed; prints the seconds of every part and folder, which
--record also writes to bench/results/test_seconds.md; the last line counts all tests.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent
RECORD = TESTS.parent / "bench" / "results" / "test_seconds.md"
SIDE_BY_SIDE = 2
SAY_EVERY_S = 60.0
NO_TESTS = 5  # pytest's exit status when a selection leaves none
COMPLAINTS = ("FAILED ", "ERROR ", "left behind by the tests", "skipped, which ")  # of pytest and of tests/conftest.py
COUNT = re.compile(r"(\d+) (failed|passed|skipped|deselected|xfailed|xpassed|warning|error)")
# Tests of e2e by what they start; those that are not named share one undisturbed `megagrpo run`.
E2E = {
    # one service, and two engines
    "e2e-engines": ("engines", "gateway", "service", "service_failures", "tools"),
    "e2e-faults": ("clone_names", "restart", "run_failures", "soak"),  # runs of their own
    "e2e-weights": ("exchange", "fp8_engine", "transports", "vision_publish"),  # engines without a service
}
# Other processors round in another order. These repeat the tests that compare numbers, each with what rests on that
# library most; without `-m "not slow"` all of UNIT_NUMERIC and DIST_NUMERIC in each.
ARITHMETIC = {
    "arithmetic-default": {
        "ATEN_CPU_CAPABILITY": "default",  # no vector instructions in torch's own kernels
        "OMP_NUM_THREADS": "2",  # of unit tests: ranks set actor.threads
    },
    "arithmetic-avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",  # matrix products, bfloat16 too
        "MKL_CBWR": "COMPATIBLE",
    },
}
UNIT_NUMERIC = {
    # logarithms, exponentials and sums, torch's own kernels
    **dict.fromkeys(("algo_loss", "algo_statistics", "golden_losses", "golden_rest"), "arithmetic-default"),
    # matrix products, and wide sums
    **dict.fromkeys(("algo_logprob", "algo_router_losses", "algo_advantage", "batch"), "arithmetic-avx2"),
    "golden_advantages": "arithmetic-avx2",
}
DIST_NUMERIC = {
    # float32 gradients of every layout to 1e-5; without --full SHORT alone
    "certify": "arithmetic-avx2",
    "logprob_ranks": "arithmetic-default",  # logarithms and exponentials, torch's own kernels
    "shared_kv_heads": "arithmetic-avx2",  # gradients of attention, by matrix products
    "actor_layouts": None,
    "full_kl": None,
    "optimizer_variants": None,
    "overlap": None,
    "router_bias": None,
}
# files of ranks that also pass on the device of tests/hostcuda, as they stand
DIST_ON_DEVICE = (
    *("actor_checkpoint", "actor_lora", "actor_vision", "certify", "draft", "overlap"),
    *("router_bias", "routing_replay", "statistics"),
)
SHORT = {"certify": "::test_every_fault_is_found_and_nothing_else"}
UNIT_WORKERS = min(len(os.sched_getaffinity(0)) + 1, 8)  # many tests wait for a process of theirs


def parts_alone() -> dict[str, list[str]]:
    """What pytest is given for each part that fills all cores by itself."""
    return {"unit": ["-n", str(UNIT_WORKERS), "--dist", "worksteal", str(TESTS / "unit")]}


def parts_of_arithmetic(full: bool) -> dict[str, list[str]]:
    """What pytest is given for each repetition under ARITHMETIC."""
    parts = {}
    for part in ARITHMETIC:
        unit = [name for name, own in UNIT_NUMERIC.items() if full or part == own]
        ranks = ["arithmetic", *(name for name, own in DIST_NUMERIC.items() if full or part == own)]
        files = [str(TESTS / "dist" / f"test_{name}.py") + ("" if full else SHORT.get(name, "")) for name in ranks]
        parts[part] = [*(str(TESTS / "unit" / f"test_{name}.py") for name in unit), *files]
    return parts


def parts_together(full: bool) -> dict[str, list[str]]:
    """What pytest is given for each of the others, the longest first; full: files of ranks on the
    pretended device too."""
    e2e = {part: [str(TESTS / "e2e" / f"test_{name}.py") for name in names] for part, names in E2E.items()}
    named = {path for paths in e2e.values() for path in paths}
    e2e["e2e-runs"] = [path for path in map(str, sorted((TESTS / "e2e").glob("test_*.py"))) if path not in named]
    folders = {name: [str(TESTS / name)] for name in ("dist", "cluster", "gpu", "hostcuda")}
    actor = sorted(map(str, (TESTS / "dist").glob("test_actor*.py")))  # a third of the seconds of ranks
    folders |= {"dist": folders["dist"] + [f"--ignore={path}" for path in actor], "dist-actor": actor}
    if not full:  # those repeat it, and nothing else of its file
        again = [f"{TESTS}/dist/test_{name}.py{test}" for name, test in SHORT.items()]
        folders["dist"] += [word for path in again for word in ("--deselect", path)]
    if full:
        files = [str(TESTS / "dist" / f"test_{name}.py") for name in DIST_ON_DEVICE]
        folders["hostcuda-dist"] = ["--hostcuda", "-m", "not slow", *files]
    order = ["dist", "dist-actor", "e2e-runs", "e2e-engines", "e2e-weights", "e2e-faults", "hostcuda"]
    order += ["cluster", "gpu", *folders.keys() & {"hostcuda-dist"}]
    return {name: (e2e | folders)[name] for name in order}


class Part:
    """Some of the tests as a pytest of their own, whose output is printed when it has ended."""

    def __init__(self, name: str, options: list[str], logs: Path):
        self.name = name
        self.log = logs / f"{name}.log"
        self.times = logs / f"{name}.xml"
        self.started = time.monotonic()
        command = [sys.executable, "-m", "pytest", "--durations=25", f"--junit-xml={self.times}"]
        streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *options], stdout=log, env=os.environ | ARITHMETIC.get(name, {}), **streams
            )

    def progress(self) -> str:
        shares = re.findall(r"\[ *(\d+)%\]", self.log.read_text(errors="replace"))
        return f"{self.name} {shares[-1] if shares else 0}%"

    def report(self) -> "Ended":
        """Prints the whole output; returns what the part took and its line that counts tests."""
        text = self.log.read_text(errors="replace")
        seconds = time.monotonic() - self.started
        print(f"[test] {self.name}: {seconds:.0f} s\n{text}", flush=True)
        counts = [line for line in text.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
        status = self.process.returncode
        complaints = [line for line in text.splitlines() if line.startswith(COMPLAINTS)]
        return Ended(status, counts[-1] if counts else "", seconds, seconds_by_file(self.times), complaints)


@dataclass(frozen=True)
class Ended:
    """How a part ended. counts: the line that counts its tests; of_files: seconds by test file; complaints: lines that
    say why it failed."""

    status: int
    counts: str
    seconds: float
    of_files: Counter[str]
    complaints: list[str]


def seconds_by_file(report: Path) -> Counter[str]:
    """The seconds of the tests of each file, such as tests.unit.test_batch, with their fixtures."""
    found: Counter[str] = Counter()
    if report.exists():  # else pytest did not come to its end
        for case in ElementTree.parse(report).iter("testcase"):
            module = re.match(r"[\w.]*?\btest_\w+", case.get("classname", ""))
            found[module[0] if module else "others"] += float(case.get("time", 0.0))
    return found


def run(parts: dict[str, list[str]], at_once: int, arguments: list[str], logs: Path) -> dict[str, Ended]:
    """Runs the parts, some at once; returns how each ended."""
    waiting = list(parts)
    running: list[Part] = []
    results: dict[str, Ended] = {}
    said = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                running.append(Part(name, [*parts[name], *arguments], logs))
            time.sleep(0.2)
            for part in [part for part in running if part.process.poll() is not None]:
                running.remove(part)
                results[part.name] = part.report()
            if running and time.monotonic() > said + SAY_EVERY_S:
                said = time.monotonic()
                print("[test]", ", ".join(part.progress() for part in running), flush=True)
    finally:
        for part in running:
            part.process.send_signal(signal.SIGINT)  # pytest ends its fixtures
            part.process.wait()
            part.report()
    return results


def total(lines: list[str], seconds: float) -> str:
    """pytest's closing line for the sum of all parts."""
    counts: Counter[str] = Counter()
    for number, what in (found for line in lines for found in COUNT.findall(line)):
        counts[what] += int(number)
    return f" {', '.join(f'{number} {what}' for what, number in counts.items())} in {seconds:.2f}s "


def seconds_table(results: dict[str, Ended]) -> str:
    """Markdown: what each part took, and the tests of each folder with their slowest files."""
    lines = ["| part | seconds | tests |", "|---|---|---|"]
    for name, ended in results.items():
        lines.append(f"| {name} | {ended.seconds:.0f} | {ended.counts.strip('= ')} |")
    lines += ["", "| folder | seconds inside tests | slowest files |", "|---|---|---|"]
    files = sum((ended.of_files for ended in results.values()), Counter())
    folders = Counter()
    for module, seconds in files.items():
        folders[module.rpartition(".")[0]] += seconds
    for folder, seconds in folders.most_common():
        own = Counter({m: s for m, s in files.items() if m.rpartition(".")[0] == folder})
        slowest = [f"{m.rpartition('.')[2]} {s:.0f}" for m, s in own.most_common(5)]
        lines.append(f"| {folder} | {seconds:.0f} | {', '.join(slowest)} |")
    return "\n".join(lines) + "\n"


@contextmanager
def runs_of_a_user() -> Iterator[None]:
    """Run folders of both laptop examples inside the block, with contents that break a test that reads them.

    A user who has run the quickstart has such folders; unit tests must not depend on them. Existing ones stay.
    """
    runs = TESTS.parent / "runs"
    made = [runs / name for name in ("quickstart", "smollm2") if not (runs / name).exists()]
    files = ("model/config.json", "random/config.json", "pretrained/config.json", "data/train.jsonl")
    try:
        for path in (folder / name for folder in made for name in files):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("not for tests")
        yield
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    record = "--record" in arguments
    arguments = [word for word in arguments if word != "--record"]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tests-") as logs:
        with runs_of_a_user():
            results = run(parts_alone(), 1, arguments, Path(logs))
        full = "not slow" not in arguments
        together = parts_together(full) | parts_of_arithmetic(full)
        results |= run(together, SIDE_BY_SIDE, arguments, Path(logs))
    failed = [
        f"{name} (exit status {ended.status})" for name, ended in results.items() if ended.status not in (0, NO_TESTS)
    ]
    for name, ended in results.items():
        print(f"[test] {name}: {ended.counts.strip('= ') or 'ended without a count'}")
    print(table := seconds_table(results))
    if record:
        RECORD.write_text(table)
    if failed:
        print(f"[test] FAILED: {', '.join(failed)}")
        print(*(line for ended in results.values() for line in ended.complaints), sep="\n")
    print(total([ended.counts for ended in results.values()], time.monotonic() - started).center(100, "="))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
