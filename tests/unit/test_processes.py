"""Children end with their parent, and a tree ends as a whole."""

import signal
import sys
import time

import psutil

from megagrpo.system.environment import child_environment
from megagrpo.system.processes import is_live, process_tree, spawn, stop_tree

# Ignores TERM, has a child, and a grandchild whose parent is gone: all must end.
_STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
subprocess.Popen(sleep)
if os.fork() == 0:
    subprocess.Popen(sleep)
    os._exit(0)
os.wait()
print("up", flush=True)
time.sleep(600)
"""


def start(code: str, log) -> tuple:
    process = spawn([sys.executable, "-c", code], child_environment(), log)
    deadline = time.monotonic() + 30
    while "up" not in log.read_text():
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()
        time.sleep(0.02)
    return process, process_tree(process.pid)


def test_whole_tree_ends(tmp_path):
    process, tree = start(_STUBBORN, tmp_path / "deep" / "log")
    assert len(tree) == 3
    stop_tree(process.pid, grace_s=0.3)
    assert process.wait(5) == -signal.SIGKILL
    assert not [p for p in tree if is_live(p)]


def test_term_is_enough_for_the_polite(tmp_path):
    process, _ = start("import time; print('up', flush=True); time.sleep(600)", tmp_path / "log")
    started = time.monotonic()
    stop_tree(process.pid, grace_s=30)
    assert process.wait(5) == -signal.SIGTERM and time.monotonic() - started < 10
    stop_tree(process.pid)  # one that is gone is no error


def test_child_dies_with_its_parent(tmp_path):
    """Also when the parent cannot do anything about it."""
    code = f"""
import sys, time
from pathlib import Path
from megagrpo.system.environment import child_environment
from megagrpo.system.processes import spawn
command = [sys.executable, "-c", "import time; time.sleep(600)"]
print(spawn(command, child_environment(), Path({str(tmp_path / "inner")!r})).pid, flush=True)
print("up", flush=True)
time.sleep(600)
"""
    process, _ = start(code, tmp_path / "log")
    child = psutil.Process(int((tmp_path / "log").read_text().split()[0]))
    assert is_live(child)
    process.kill()
    process.wait(10)
    deadline = time.monotonic() + 10
    while is_live(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)
