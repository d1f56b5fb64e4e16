"""The device's own rules, each in rules.py: what it refuses as CUDA does, and what it computes."""

import subprocess
import sys

import pytest

from tests.hostcuda.build import environment

RULES = (*("index", "values", "memory", "dtype", "pinned", "waits"), *("streams", "freed", "pool", "threads", "hidden"))
RUN = """
import os, sys
from tests.hostcuda import rules

for name in sys.argv[1:]:
    if os.fork() == 0:
        status = 1
        try:
            getattr(rules, name)()
            status = 0
        finally:
            sys.excepthook(*sys.exc_info()) if status else None
            sys.stderr.flush()
            os._exit(status)
    print(name, os.wait()[1], flush=True)
"""


@pytest.fixture(scope="module")
def ran() -> subprocess.CompletedProcess:
    """One process that has the device, forked for each rule."""
    command = [sys.executable, "-W", "ignore", "-c", RUN, *RULES]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("rule", RULES)
def test_rule(ran: subprocess.CompletedProcess, rule: str):
    assert f"{rule} 0\n" in ran.stdout, ran.stderr[-5000:]
