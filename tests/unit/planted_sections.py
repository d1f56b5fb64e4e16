"""Sections of a GPU kit that go wrong, each in its own way."""

import os
import signal
import subprocess
import sys
import time

from bench.gpu_kit.figures import Figures, Setting, Unavailable


def works(figures: Figures, setting: Setting) -> None:
    figures.add("size", setting.of(1000, 2), "bytes", at_most=10.0)


def raises(figures: Figures, setting: Setting) -> None:
    figures.add("before the end", 1.5)
    raise RuntimeError("CUDA out of memory.\nTried to allocate 2.00 GiB")


def crashes(figures: Figures, setting: Setting) -> None:
    figures.add("before the end", 1.5)
    print("about to crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(figures: Figures, setting: Setting) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    figures.add("pid of what it started", sleeper.pid)
    time.sleep(300)


def lacks(figures: Figures, setting: Setting) -> None:
    raise Unavailable("not installed here: flash_attn")


def misses(figures: Figures, setting: Setting) -> None:
    import a_library_that_nobody_has  # noqa: F401  # the import is the test


def above(figures: Figures, setting: Setting) -> None:
    figures.add("error", 0.5, "nats", at_most=0.1)
    figures.add("not a number", float("nan"), at_most=0.1)
