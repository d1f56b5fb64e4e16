"""What every test shares: time limits by folder, few threads, and the check that nothing outlives the session."""

import importlib.util
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import pytest

from tests.skips import reason_is_known

# several times what a busy machine needs
TIMEOUT_S = {"unit": 300, "dist": 900, "e2e": 1200, "cluster": 1800, "gpu": 600}
TIMEOUT_S["hostcuda"] = TIMEOUT_S["dist"]
SESSION_VARIABLE = "MEGAGRPO_TEST_SESSION"
GRACE_S = 60.0  # Ray and SGLang end in several steps

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share few cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # a name of a model that a test makes up is asked nowhere
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ  # of `pytest -n`, whose controller starts it and looks after it
if not IS_WORKER:
    os.environ[SESSION_VARIABLE] = uuid.uuid4().hex  # every process that a test starts inherits it
if importlib.util.find_spec("hypothesis"):  # tests/gpu runs where it is not installed
    import hypothesis

    hypothesis.settings.register_profile("project", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", action="store_true", help="write what the tests measure to bench/results")
    parser.addoption(
        "--hostcuda", action="store_true", help="ranks of tests/dist compute on a CUDA device that the host pretends"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    timed = config.pluginmanager.hasplugin("timeout")  # not on a bare machine with a GPU
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        if timed and folder in TIMEOUT_S and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S[folder]))
        on_device = folder == "hostcuda" or config.getoption("--hostcuda")
        if on_device and _torch_is_for_cuda():  # before any fixture makes models
            reason = "the pretended device is for a build of torch without CUDA"
            item.add_marker(pytest.mark.skip(reason=reason))


@cache
def _torch_is_for_cuda() -> bool:
    import torch

    return torch.version.cuda is not None


@pytest.fixture(scope="session")
def model_of(tmp_path_factory) -> Callable[..., Path]:
    """model_of(make, *arguments) is what make(folder, *arguments) returns, the folder of a model;
    the same model is made once a session, so that nobody may change it."""

    @cache
    def made(make: Callable[..., Path], *arguments: object) -> Path:
        return make(tmp_path_factory.mktemp("model") / "model", *arguments)

    return made


_unknown_skips: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not reason_is_known(reason):
            _unknown_skips.append(f"{report.nodeid}: {reason}")


@pytest.hookimpl(trylast=True)  # after the workers of `pytest -n` have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skip without a known reason fails a session, and a process left behind, which holds memory and ports."""
    if IS_WORKER:
        return
    if _unknown_skips:
        print("", *(f"skipped, which tests/skips.py does not allow: {skip}" for skip in _unknown_skips), sep="\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    deadline = time.monotonic() + GRACE_S
    while (left := processes_of_session()) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            print(f"\nleft behind by the tests: pid {process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def processes_of_session() -> list[psutil.Process]:
    """Running processes other than this one that carry this session's variable, however often they were re-parented."""
    session, found = os.environ[SESSION_VARIABLE], []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            ours = process.pid != os.getpid() and process.environ().get(SESSION_VARIABLE) == session
            # multiprocessing's tracker belongs to this process and ends with it.
            tracker = ours and "resource_tracker" in " ".join(process.cmdline())
            if ours and not tracker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
