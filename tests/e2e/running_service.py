"""A rollout service as a child process, and what a trainer would do to it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.control import ServiceControl, bearer, find_service
from megagrpo.system.environment import child_environment
from megagrpo.system.processes import is_live, spawn, stop_tree
from megagrpo.types import EngineInfo
from tests.experiments import until

START_S = 480.0
_SERVE = """
import sys
from pathlib import Path
from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service.server import serve
sys.exit(serve(ExperimentConfig.model_validate_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), *sys.argv[3:]))
"""


@dataclass
class RunningService:
    config: ExperimentConfig
    run_dir: Path
    process: subprocess.Popen
    control: ServiceControl

    def wait_alive(self, number: int = 0) -> EngineInfo:
        """The engine of this number, the first unless told, when it answers."""
        until(lambda: self.control.engines()[number].alive, START_S, self.control.engines, 0.1)
        return self.control.engines()[number]

    def stop(self) -> None:
        """End it as a user would, and check that nothing is left."""
        tree = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.terminate()
        try:
            assert self.process.wait(240) == 0
            assert not [p for p in tree if is_live(p)], "the service left processes behind"
            assert not (self.run_dir / "service.json").exists() and not (self.run_dir / "service.key").exists()
        finally:
            stop_tree(self.process.pid)

    def set_version(self, version: int, number: int = 0) -> None:
        """What the exchange does after an update of one engine; here the weights stay those of the folder."""
        engine = self.wait_alive(number)
        body, key = {"new_version": str(version)}, bearer(self.control.api_key)
        httpx.post(f"{engine.url}/update_weight_version", json=body, headers=key, timeout=60).raise_for_status()
        assert not self.control.report("ready", {engine.id: engine.incarnation}, version)


@contextmanager
def running_service(
    config: ExperimentConfig, run_dir: Path, *ray_address: str, env: dict[str, str] | None = None
) -> Iterator[RunningService]:
    """Ends with the block, as a user would end it."""
    process, running = start_service(config, run_dir, *ray_address, env=env), None
    try:
        running = RunningService(config, run_dir, process, wait_for_service(process, run_dir))
        yield running
    finally:
        running.stop() if running else stop_tree(process.pid)


def scheduler_of(engine: int) -> psutil.Process:
    """The process of an engine of one rank that computes. SGLang starts it first; not every system shows its title."""
    children = psutil.Process(engine).children(recursive=True)
    return min((c for c in children if "resource_tracker" not in " ".join(c.cmdline())), key=psutil.Process.create_time)


def start_service(
    config: ExperimentConfig, run_dir: Path, *ray_address: str, env: dict[str, str] | None = None
) -> subprocess.Popen:
    run_dir.mkdir(parents=True, exist_ok=True)
    file = run_dir / "experiment.json"
    file.write_text(config.model_dump_json())
    command = [sys.executable, "-c", _SERVE, str(file), str(run_dir), *ray_address]
    return spawn(command, child_environment(env), run_dir / "serve.log")


def wait_for_service(process: subprocess.Popen, run_dir: Path) -> ServiceControl:
    log = run_dir / "serve.log"
    until(lambda: (run_dir / "service.json").exists() or process.poll() is not None, START_S, log.read_text, 0.1)
    assert process.poll() is None, log.read_text()[-3000:]
    return find_service(run_dir)
