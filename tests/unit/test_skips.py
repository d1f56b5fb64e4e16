"""A test may skip only for a reason that tests/skips.py lists; any other skip fails the session."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("reason", "status"), [("no CUDA device", 0), ("no namespaces here: the kernel has none", 0), ("flaky", 1)]
)
def test_a_session_fails_on_an_unknown_reason(tmp_path: Path, reason: str, status: int):
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_it.py").write_text(f"import pytest\ndef test_it(): pytest.skip({reason!r})\n")
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # not a worker
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
