"""The sandbox of a task on this machine: a copy of its files in a scratch folder, and a process tree
per command."""

import asyncio
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import psutil

from megagrpo.sandbox.sandbox import interpreter, system_paths
from megagrpo.system.processes import stop_tree

_TAIL = 2**16  # bytes of an output
_READ_S = 10.0  # for the file with the reward
_KILLED = (-9, 137)
# lines of a Dockerfile that need no image
_PLAIN = re.compile(r"(#.*|FROM .*|WORKDIR /app/?|COPY \. (\.|/app)/?|)", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w./-])/(?=(app|tests|logs)\b)")
# of /etc: no secrets, but links and tables that programs need
_ETC = ("alternatives", "ld.so.cache", "ssl", "passwd", "group", "nsswitch.conf", "localtime")


class Local:
    """The folder /app begins as environment/, as its Dockerfile must say: there is no image.

    isolated: commands run in bubblewrap, without network, and see /app, /tmp and the system's
    programs. Otherwise they run as this process's user, and these paths in commands, scripts and
    outputs are translated. What a command leaves in the background ends with it.
    """

    def __init__(self, task: Path, config: Mapping, isolated: bool):
        self._task = task
        self._isolated = isolated
        self._config = config
        environment = config.get("environment", {})
        kib = {name: 1024 * _mib(environment, name) for name in ("memory", "storage")}
        self._limits = f"ulimit -v {kib['memory']} -f {kib['storage']}\n"
        self._scratch = Path(tempfile.mkdtemp(prefix="harbor-"))
        self._shown = ["app", "tmp"]  # folders that commands see
        self._variables = {
            "PATH": f"{os.path.dirname(interpreter())}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": "/tmp",
            "MEGAGRPO_SANDBOX": str(self._scratch),  # which finds those in other sessions
            **environment.get("env", {}),
        }

    async def start(self) -> None:
        """Makes /app. Raises ValueError for a task that needs an image, or without bubblewrap."""
        if self._isolated and shutil.which("bwrap") is None:
            raise ValueError("runtime bubblewrap: no bwrap here; `apt-get install bubblewrap`")
        source = self._task / "environment"
        lines = (source / "Dockerfile").read_text(encoding="utf-8").splitlines()
        for line in (*lines, *(path.name for path in source.glob("docker-compose*"))):
            if not _PLAIN.fullmatch(line.strip()):
                raise ValueError(
                    f"{source}/Dockerfile: {line.strip():.200}: only an image can have this; take "
                    "runtime: docker"
                )
        shutil.copytree(source, self._scratch / "app", ignore=shutil.ignore_patterns("Dockerfile"))
        (self._scratch / "tmp").mkdir()

    async def run(self, command: str, seconds: float) -> tuple[str, str]:
        """Returns "exit code N" or "time limit", and the end of the output."""
        words = ["timeout", "-s", "KILL", str(seconds), "bash", "-c"]
        if self._isolated:
            words = [*self._bubblewrap(), *words]
        with tempfile.TemporaryFile() as file:
            process = await asyncio.create_subprocess_exec(
                *(*words, self._limits + self._here(command)),
                cwd=self._scratch / "app",
                env=self._variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            async with AsyncExitStack() as stack:
                stack.push_async_callback(asyncio.to_thread, self._end, process.pid)
                code = await process.wait()
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            output = file.read().decode(errors="replace").replace(str(self._scratch), "")
        return "time limit" if code in _KILLED else f"exit code {code}", output

    async def verify(self, seconds: float) -> object:
        """Returns the rewards of the tests, the output of tests that wrote none, or None if they
        reach the limit."""
        tests = self._scratch / "tests"
        shutil.copytree(self._task / "tests", tests)
        (self._scratch / "logs" / "verifier").mkdir(parents=True)
        self._shown += ["tests", "logs"]
        self._variables |= self._config.get("verifier", {}).get("env", {})
        for path in (*tests.rglob("*.sh"), *tests.rglob("*.py")):
            path.write_text(self._here(path.read_text(encoding="utf-8")), encoding="utf-8")
        end, said = await self.run("bash /tests/test.sh", seconds)
        if end == "time limit":
            return None
        file = "/logs/verifier/reward"
        # in the sandbox: the file may be a link
        _, text = await self.run(f"cat {file}.json 2> /dev/null || cat {file}.txt", _READ_S)
        with suppress(ValueError):
            return json.loads(text)
        return f"{text}{end}: {said[-500:]}"

    async def close(self) -> None:
        """Removes the files."""
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    def _end(self, pid: int) -> None:
        """Ends what a command left behind."""
        stop_tree(pid, 0.0)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("MEGAGRPO_SANDBOX") == str(self._scratch):
                    process.kill()

    def _here(self, text: str) -> str:
        return text if self._isolated else _PATH.sub(f"{self._scratch}/", text)

    def _bubblewrap(self) -> list[str]:
        readable, links = system_paths()
        mounts = [
            ("--unshare-all", "--unshare-user", "--die-with-parent", "--cap-drop", "ALL"),
            ("--size", "1048576", "--tmpfs", "/"),
            *(("--ro-bind", path, path) for path in readable),
            *(("--ro-bind-try", f"/etc/{name}", f"/etc/{name}") for name in _ETC),
            *(("--symlink", target, path) for path, target in links.items()),
            *(("--bind", str(self._scratch / name), f"/{name}") for name in self._shown),
            ("--dev", "/dev", "--proc", "/proc", "--chdir", "/app"),
        ]
        return ["bwrap", *(word for mount in mounts for word in mount)]


def _mib(section: Mapping, name: str) -> int:
    """Returns a size, "memory_mb" or in the older form "memory" = "2G"; 2 GiB without one."""
    text = str(section.get(f"{name}_mb") or section.get(name) or "2G").upper()
    return int(float(text.rstrip("GM")) * (1024 if text.endswith("G") else 1))
