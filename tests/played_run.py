"""A start of a run in seconds: `megagrpo run` itself, its command line, launcher, signals, stop request, ranks,
checkpoints and record, in processes that a template forks with the libraries imported.

Four parts are played: torchrun (starts ranks, and starts all again if one fails), the service and its engine (a
response is a function of its request), the exchange (notes the digest of the weights that it would publish) and the
report at the end.

An audit hook in a rank counts what it opens, renames, makes and removes in its run folder, and lets happen at the
n-th call what the start's `Event` says.
"""

import ctypes
import errno
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from megagrpo.system.run_folder import RunFolder

LIMIT_S = 120.0  # of a start
LEFT_S = 8.0  # in which a process that outlives its launcher may end
SERVICE_S = 240
AGAIN_S = 0.3  # ranks that torchrun starts again import for longer
ASKS = ("usr1", "storm", "int", "int int", "stop", "time limit")
ENDS = ("term", "stop --now")
FAILS = ("evaluation", "publish", "grader")
FILES = {"save": ("checkpoints",), "record": ("rollouts", "trained", "metrics")}
KILLS = ("kill rank", "kill all")
KINDS = ("nothing", *ASKS, *ENDS, *FAILS, *FILES, *KILLS)
CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.truncate")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
MORE_CALLS = 12  # between a time limit's first signal and the kill


@dataclass(frozen=True)
class Event:
    """What happens to a start: `kind` at the `at`-th call of a rank in the run folder, to the
    engine or its weights from version `at` on."""

    kind: str = "nothing"
    at: int = 1
    rank: int = 0
    error: int = errno.EIO


NOTHING = Event()


@dataclass
class Plan:
    """A start, as its processes know it: the experiment, and files beside the run folder."""

    config: str
    folder: str
    event: Event
    notes: str

    def note(self, name: str) -> Path:
        return Path(self.notes) / name

    def happens(self) -> None:
        self.note("happened").touch()


PLAN: Plan
LAUNCHER = 0


def one_start(rank: int, plan: Plan) -> dict:
    """Forks the launcher, does to it what its rank asks for, and returns how it ended: status, what it
    printed, and the processes that were left."""
    global PLAN
    PLAN = plan
    _import_all(plan)
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans of the launcher come here
    launcher = os.fork()
    if launcher == 0:
        _as_program(lambda: _launch(plan))
    status, deadline = None, time.monotonic() + LIMIT_S
    kind = plan.event.kind
    while status is None:
        done, code = os.waitpid(launcher, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        elif plan.note("asks").exists():
            if not plan.note("happened").exists():
                _act(launcher, plan)
                plan.happens()
            elif kind in ("storm", "time limit"):
                os.kill(launcher, signal.SIGUSR1)
                time.sleep(0.02)
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    deadline = time.monotonic() + LEFT_S
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        children = psutil.Process().children(recursive=True)
        if not children or time.monotonic() > deadline or status is None:
            break
        time.sleep(0.01)
    left = []
    for child in children:
        with suppress(psutil.Error):
            left.append(f"{child.pid} {' '.join(child.cmdline())[-200:]}")
            child.kill()
    text = plan.note("terminal").read_text(errors="replace")
    shell = status if status is None or status >= 0 else 128 - status
    return {"status": shell, "text": text, "left": left, "happened": plan.note("happened").exists()}


def _import_all(plan: Plan) -> None:
    """Imports in the template, once, what the parts of a run import; forks need not, nor collect garbage."""
    if "megagrpo.loop.run" in sys.modules:
        return
    modules = ("cli", "check.problems", "loop.run", "loop.train", "tools.report", "tools.stop", "rewards.pool")
    for name in (*(f"megagrpo.{name}" for name in modules), "tests.fake_service", "pyarrow", "hashlib"):
        importlib.import_module(name)
    from megagrpo.config.load import load_config
    from megagrpo.data.prompts import load_tokenizer
    from megagrpo.models.folder import Model

    load_tokenizer(Model.of(load_config(Path(plan.config))))
    gc.collect()
    gc.freeze()


def _act(launcher: int, plan: Plan) -> None:
    """What the rank asks for; returns when the launcher has heard it."""
    from megagrpo.system.stop_request import StopRequest
    from megagrpo.tools.stop import stop

    kind = plan.event.kind
    request = StopRequest(RunFolder(Path(plan.folder)).stop_request("trainer"))

    def send(number: int) -> None:
        os.kill(launcher, number)
        deadline = time.monotonic() + 2
        while not request.made() and time.monotonic() < deadline:
            time.sleep(0.002)

    if kind.startswith("stop"):
        stop(Path(plan.folder), kind == "stop --now")
    elif kind == "term":
        os.kill(launcher, signal.SIGTERM)
    else:
        send(signal.SIGINT if kind.startswith("int") else signal.SIGUSR1)
        if kind == "int int":
            os.kill(launcher, signal.SIGINT)


def _as_program(main: Callable[[], int]) -> NoReturn:
    """Runs `main` in this forked process and ends it with the exit status of a program."""
    code: object = 1
    try:
        code = main()
    except SystemExit as exc:
        code = exc.code
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _launch(plan: Plan) -> int:
    global LAUNCHER
    LAUNCHER = os.getpid()
    os.setsid()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    terminal = os.open(plan.note("terminal"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    from megagrpo import cli
    from megagrpo.cluster import supervise

    supervise._LOOK_S = 0.05
    subprocess.Popen = Forked
    return cli.main(["run", plan.config])


class Forked(subprocess.Popen):
    """A child of the launcher as subprocess starts it, but forked: it need not import."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
        stand_ins = {"serve": _service, "train": _agent}
        word = next((word for word in args if word in stand_ins), None)
        if word is None or "megagrpo.cli" not in args:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        streams = {1: rest[6], 2: rest[8]}  # standard output and errors, -1: the parent's
        self.pid = os.fork()
        if self.pid == 0:
            for target, source in streams.items():
                if source >= 0:
                    os.dup2(source, target)
            _apart(preexec_fn, env)
            _as_program(lambda: stand_ins[word](args))


def _apart(arrange: Callable[[], None], env: dict[str, str]) -> None:
    """What exec would change: a session of its own, files and handlers of the parent are gone."""
    with suppress(PermissionError):
        os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != null:
            with suppress(OSError):
                os.dup2(null, int(name))
    arrange()
    os.environ.clear()
    os.environ.update(env)


def _service(args: list[str]) -> int:
    """The service and its engine."""
    from aiohttp import web

    from tests.fake_service import FakeService, running

    event, folder = PLAN.event, RunFolder(Path(PLAN.folder))

    class Service(FakeService):
        async def generate(self, request: web.Request) -> web.Response:
            greedy = (await request.json())["sampling_params"]["temperature"] == 0
            if self.version >= event.at:
                if event.kind == "evaluation" and greedy:
                    PLAN.happens()
                    return web.Response(status=400, text="on purpose")
                if event.kind == "grader" and not greedy:
                    PLAN.note("broken").touch()
                    PLAN.happens()
            return await super().generate(request)

    with running(Service()) as service:
        folder.service_key.write_text("key")
        folder.service.write_text(json.dumps({"url": service.url}))
        time.sleep(SERVICE_S)
    return 0


def _agent(args: list[str]) -> int:
    """torchrun's part: ranks, all again if one fails."""
    from megagrpo.system.processes import dies_with_parent

    world, restarts = (int(args[args.index(name) + 1]) for name in ("--nproc-per-node", "--max-restarts"))
    words = args[args.index("megagrpo.cli") + 1 :]
    ranks: dict[int, int] = {}

    def end() -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in ranks:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.05)
        for pid in ranks:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def leave(*_) -> None:
        end()
        os._exit(143)

    signal.signal(signal.SIGTERM, leave)
    agent = os.getpid()
    for start in range(restarts + 1):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks.clear()
        for rank in range(world):
            variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": start}
            pid = os.fork()
            if pid == 0:
                env = dict(os.environ) | {name: str(value) for name, value in variables.items()}
                _apart(dies_with_parent(agent, signal.SIGKILL), env)
                _as_program(lambda: _rank(words))
            ranks[pid] = rank
        failed = False
        while ranks and not failed:
            pid, code = os.waitpid(-1, 0)
            ranks.pop(pid, None)
            failed = code != 0
        if not failed:
            return 0
        end()
        time.sleep(AGAIN_S)
    return 1


def _rank(words: list[str]) -> int:
    import torch

    from megagrpo import cli
    from megagrpo.loop import run as run_module
    from megagrpo.tools import report
    from tests.played_exchange import PlayedExchange

    torch.set_num_threads(1)
    start = os.environ["TORCHELASTIC_RESTART_COUNT"]
    event = PLAN.event

    class Exchange(PlayedExchange):
        def tell(self, version: int, digest: str) -> None:
            with PLAN.note("published").open("a") as file:
                file.write(json.dumps([int(start), version, digest[:12]]) + "\n")
            if event.kind == "publish" and version >= event.at:
                PLAN.happens()
                raise TimeoutError("no engine took the weights")
            super().tell(version, digest)

    run_module.Exchange = Exchange
    report.write_report = lambda folder: "the report"
    if start == "0" and int(os.environ["RANK"]) == event.rank % int(os.environ["WORLD_SIZE"]):
        sys.addaudithook(_hook(event))
    return cli.main(words)


def _hook(event: Event) -> Callable[[str, tuple], None]:
    inside_of = PLAN.folder + "/"
    agent, calls = os.getppid(), 0
    asked = event.kind in ASKS or event.kind in ENDS

    def hook(name: str, args: tuple) -> None:
        nonlocal calls
        if name not in CALLS or not isinstance(args[0], str | os.PathLike):
            return
        path = os.fspath(args[0])
        inside = path[len(inside_of) :] if path.startswith(inside_of) else ""
        if not inside or inside.startswith("logs/ranks"):
            return
        if event.kind in FILES:
            if inside.startswith(FILES[event.kind]) and (
                name in ("os.mkdir", "os.rename") or (name == "open" and args[2] & WRITES)
            ):
                calls += 1
                if calls == event.at:
                    PLAN.happens()
                    raise OSError(event.error, os.strerror(event.error), path)
            return
        if threading.current_thread() is not threading.main_thread():
            return
        calls += 1
        if calls == event.at and event.kind == "kill rank":
            PLAN.happens()
            os.kill(os.getpid(), signal.SIGKILL)
        limit = event.kind == "time limit" and calls == event.at + MORE_CALLS
        if limit or (calls == event.at and event.kind == "kill all"):
            PLAN.happens()
            for pid in (LAUNCHER, agent, os.getpid()):
                os.kill(pid, signal.SIGKILL)
        if calls == event.at and asked:
            PLAN.note("asks").touch()
            deadline = time.monotonic() + 5
            while not PLAN.note("happened").exists() and time.monotonic() < deadline:
                time.sleep(0.002)
            if event.kind in ENDS or event.kind == "int int":
                time.sleep(10)  # the launcher ends it

    return hook
