"""A rollout service as a child process, and what a trainer would do to it."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from megagrpo.config import ExperimentConfig
from megagrpo.environment import child_environment
from megagrpo.processes import spawn, stop_tree
from megagrpo.rollout.client import EngineInfo, ServiceControl, read_service_url

START_S = 240.0
_SERVE = """
import sys
from pathlib import Path
from megagrpo.config import ExperimentConfig
from megagrpo.rollout.service import serve
sys.exit(serve(ExperimentConfig.model_validate_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2])))
"""


@dataclass
class RunningService:
    config: ExperimentConfig
    run_dir: Path
    process: subprocess.Popen
    control: ServiceControl

    def wait_alive(self) -> EngineInfo:
        """The only engine, when it answers."""
        deadline = time.monotonic() + START_S
        while not (engine := self.control.engines()[0]).alive:
            assert time.monotonic() < deadline, f"still {engine}"
            time.sleep(0.1)
        return engine

    def set_version(self, version: int) -> None:
        """What the exchange does after an update; here the weights stay those of the folder."""
        engine = self.wait_alive()
        httpx.post(f"{engine.url}/update_weight_version", json={"new_version": str(version)}, timeout=60).raise_for_status()
        assert self.control.mark_ready(engine.id, engine.incarnation, version)


def start_service(config: ExperimentConfig, run_dir: Path) -> subprocess.Popen:
    run_dir.mkdir(parents=True, exist_ok=True)
    file = run_dir / "experiment.json"
    file.write_text(config.model_dump_json())
    command = [sys.executable, "-c", _SERVE, str(file), str(run_dir)]
    return spawn(command, child_environment(), run_dir / "serve.log")


def wait_for_url(process: subprocess.Popen, run_dir: Path) -> str:
    deadline = time.monotonic() + START_S
    while not (run_dir / "service.json").exists():
        assert process.poll() is None and time.monotonic() < deadline, (run_dir / "serve.log").read_text()[-3000:]
        time.sleep(0.1)
    return read_service_url(run_dir, 0.0)
