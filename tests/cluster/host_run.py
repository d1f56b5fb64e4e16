"""A run whose processes are on the hosts that netns_hosts.py makes of this machine."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
from netns_hosts import Hosts
from run_megagrpo import trainer_below

from megagrpo.system.environment import child_environment
from megagrpo.system.processes import process_tree, spawn, stop_tree
from tests.experiments import until

SERVICE = "serve"  # by whose end no run ends


class HostRun:
    """`megagrpo` commands of one experiment, each on its host, by name; also a context manager that ends them."""

    def __init__(self, hosts: Hosts, config: Path, token: dict[str, str]):
        self.folder, self.hosts, self.config, self._token = (config.with_suffix(""), hosts, config, token)
        self._children: dict[str, subprocess.Popen] = {}

    def start(self, name: str, number: int, words: list[str]) -> None:
        """A command on host `number`."""
        python = [sys.executable, "-W", "ignore", "-m", "megagrpo.cli", *words]
        env = child_environment({"OMP_NUM_THREADS": "1"} | self._token, [str(self.folder.parent)])
        self._children[name] = spawn(self.hosts.command(number, python), env, self.log(name))

    def log(self, name: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}-{name}.log")

    def kill(self, name: str) -> None:
        """SIGKILL a launcher; what it started ends with it."""
        tree = process_tree(self._children[name].pid)
        self._children[name].kill()
        self._children[name].wait()
        psutil.wait_procs(tree, 60)

    def statuses(self) -> list[int | None]:
        """Of all but the service, in the order of their first start."""
        return [child.poll() for name, child in self._children.items() if name != SERVICE]

    def trainer(self, rank: int) -> psutil.Process | None:
        found = (trainer_below(child.pid, rank) for child in self._children.values())
        return next(filter(None, found), None)

    def wait_for(self, ready, what: str, timeout_s: float = 600.0, poll_s: float = 0.01):
        """The first true value of ready(); trainers must run until then."""

        def look():
            assert None in self.statuses(), f"ended before {what}: {self.end()}"
            return ready()

        return until(look, timeout_s, lambda: f"no {what} in {timeout_s} s\n{self.end()}", poll_s)

    def wait_for_step(self, step: int) -> None:
        path = self.folder / "rollouts" / f"step_{step:06}.replica_0.jsonl"
        self.wait_for(path.exists, f"step {step}", poll_s=0.1)

    def interrupt(self, name: str) -> None:
        """Ctrl-C at a launcher."""
        self._children[name].send_signal(signal.SIGINT)

    def finish(self, timeout_s: float = 900.0, status: int = 0) -> None:
        until(lambda: None not in self.statuses(), timeout_s, self.end, 0.2)
        assert set(self.statuses()) == {status}, self.end()

    def end(self) -> str:
        """The last lines of every log."""
        logs = [*self.folder.parent.glob(f"{self.folder.name}-*.log"), *self.folder.glob("logs/*.log")]
        return "\n".join(f"== {log}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def __enter__(self) -> "HostRun":
        return self

    def __exit__(self, *exc_info) -> None:
        for child in self._children.values():
            stop_tree(child.pid, 30.0)
            child.wait()
