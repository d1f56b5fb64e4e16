"""The sandbox of a task on this machine: a copy of its files in a scratch folder, and a process tree
per command."""

import asyncio
import json
import math
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import psutil

from megagrpo.sandbox.sandbox import interpreter, system_paths
from megagrpo.system.processes import dies_with_parent, stop_tree

_TAIL = 2**16  # bytes of an output
_READ_S = 10.0  # for the file with the reward
_KILLED = (-9, 137)
# lines of a Dockerfile that need no image
_PLAIN = re.compile(r"(#.*|FROM .*|WORKDIR /app/?|COPY \. (\.|/app)/?|)", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w./-])/(?=(app|tests|logs|tmp)\b)")
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
        self._tests_variables = config.get("verifier", {}).get("env", {})
        environment = config.get("environment", {})
        kib = {name: 1024 * _mib(environment, name) for name in ("memory", "storage")}
        self._limits = f"ulimit -v {kib['memory']} -f {kib['storage']}\n"
        self._scratch = Path(tempfile.mkdtemp(prefix="harbor-"))
        self._shown = ["app", "tmp"]  # folders that commands see
        self._variables = {
            "PATH": f"{os.path.dirname(interpreter())}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": self.written("/tmp"),
            "MEGAGRPO_SANDBOX": str(self._scratch),  # which finds those in other sessions
            **environment.get("env", {}),
        }

    async def start(self) -> None:
        """Makes /app. Raises ValueError for a task that needs an image, or without bubblewrap."""
        if self._isolated and shutil.which("bwrap") is None:
            raise ValueError("runtime bubblewrap: no bwrap here; `apt-get install bubblewrap`")
        source = self._task / "environment"
        lines = (source / "Dockerfile").read_text(encoding="utf-8").splitlines()
        lines += [path.name for path in source.glob("docker-compose*")]
        lines += self._config.get("environment", {}).keys() & {"workdir"}
        values = (*self._variables.values(), *self._tests_variables.values())
        lines += [value for value in values if "${" in value]  # Harbor's package fills it in
        for line in lines:
            if not _PLAIN.fullmatch(line.strip()):
                raise ValueError(
                    f"{self._task}: {line.strip():.200}: only an image can "
                    "have this; take runtime: docker"
                )
        # links stay links, as in COPY; in a thread, because others' programs share this one
        await asyncio.to_thread(shutil.copytree, source, self._scratch / "app", symlinks=True)
        (self._scratch / "tmp").mkdir()

    async def run(self, command: str, seconds: float) -> tuple[str, str]:
        """Returns "exit code N" or "time limit", and the end of the output."""
        # TERM, if this process dies, makes `timeout` end the command; after a second it kills
        words = ["timeout", "-k", "1", "-s", "KILL", str(seconds), "bash", "-c"]
        began = time.monotonic()
        if self._isolated:
            words = [*self._bubblewrap(), *words]
        with tempfile.TemporaryFile() as file:
            process = await asyncio.create_subprocess_exec(
                *(*words, self._limits + self.written(f"cd /app 2> /dev/null\n{command}")),
                cwd=self._scratch,
                env=self._variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=dies_with_parent(os.getpid(), signal.SIGTERM),
            )
            async with AsyncExitStack() as stack:
                stack.push_async_callback(asyncio.to_thread, self._end, process)
                code = await process.wait()
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            output = file.read().decode(errors="replace").replace(str(self._scratch), "")
        late = code in _KILLED and time.monotonic() - began >= seconds
        return "time limit" if late else f"exit code {code}", output

    async def verify(self, seconds: float) -> object:
        """Returns the rewards of the tests, the output of tests that wrote none, or None if they
        reach the limit."""
        tests = self._scratch / "tests"
        # What a command has made, or closed to itself: root in an image would still have access.
        # `find` does not follow links.
        rights = "find /tests /logs -type d -exec chmod u+rwx {} ';'; rm -rf /tests /logs"
        rights += "; mkdir -p /app; chmod u+rwx /app"
        await self.run(rights, _READ_S)
        await asyncio.to_thread(shutil.copytree, self._task / "tests", tests)
        (self._scratch / "logs" / "verifier").mkdir(parents=True)
        self._shown += ["tests", "logs"]
        self._variables |= self._tests_variables
        for path in () if self._isolated else (*tests.rglob("*.sh"), *tests.rglob("*.py")):
            path.write_bytes(os.fsencode(self.written(os.fsdecode(path.read_bytes()))))
        # by its own first line, which may be `#!/bin/bash -e`
        end, said = await self.run("chmod +x /tests/test.sh; /tests/test.sh", seconds)
        if end == "time limit":
            return None
        shown = ""
        reads: dict[str, Callable[[str], object]] = {"json": json.loads, "txt": float}
        for kind, read in reads.items():  # the first may be a report, without a reward
            # in the sandbox: the file may be a link
            _, text = await self.run(f"cat /logs/verifier/reward.{kind} 2> /dev/null", _READ_S)
            shown += text
            with suppress(ValueError):
                rewards = read(text)
                if reward_in(rewards) is not None:
                    return rewards
        return f"{shown}{end}: {said[-500:]}"

    async def close(self) -> None:
        """Removes the files, also from folders without rights."""
        removal = 'chmod -R u+rwx "$0" 2> /dev/null; rm -rf "$0"'
        await (await asyncio.create_subprocess_exec("sh", "-c", removal, self._scratch)).wait()

    def _end(self, process: asyncio.subprocess.Process) -> None:
        """Ends what a command left behind."""
        if self._isolated and process.returncode is not None:
            return  # its namespace has ended with it
        stop_tree(process.pid, 0.0)
        for other in psutil.process_iter():
            with suppress(psutil.Error):
                if other.environ().get("MEGAGRPO_SANDBOX") == str(self._scratch):
                    other.kill()

    def written(self, text: str) -> str:
        """Returns a command as it stands in a command line."""
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
            ("--dev", "/dev", "--proc", "/proc", "--chdir", "/"),
        ]
        return ["bwrap", *(word for mount in mounts for word in mount)]


def reward_in(verdict: object) -> float | None:
    """Returns the number of a verdict, or of its entry `reward`; None without one, as Harbor takes
    a bool."""
    number = verdict.get("reward") if isinstance(verdict, Mapping) else verdict
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    return float(number) if math.isfinite(number) else None


def _mib(section: Mapping, name: str) -> int:
    """Returns a size, "memory_mb" or in the older form "memory" = "2G"; 2 GiB without one."""
    text = str(section.get(f"{name}_mb") or section.get(name) or "2G").upper()
    return int(float(text.rstrip("GM")) * (1024 if text.endswith("G") else 1))
