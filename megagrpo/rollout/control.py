"""Client of the rollout service's control endpoint, for trainers and the command line."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from megagrpo.system import environment
from megagrpo.system.errors import translated
from megagrpo.system.run_folder import RunFolder
from megagrpo.types import EngineEvent, EngineInfo

CONTROL_TIMEOUT_S = 120.0  # an engine resumes its memory meanwhile
_STATUS_TIMEOUT_S = 20.0
UNREACHABLE_S = 30.0  # a control endpoint that is silent for longer ends the run
_AGAIN_S = 1.0  # between two attempts within it
T = TypeVar("T")
# Several threads call: one might close an idle connection that another has just taken from the
# pool.
_NO_IDLE_CONNECTIONS = httpx.Limits(max_keepalive_connections=0)


class ServiceUnreachable(RuntimeError):
    """Raised when the service or an engine does not answer, or refuses the key."""


class ServiceFailed(RuntimeError):
    """Raised with the service's reason when it reports its failure."""


@dataclass(frozen=True)
class ServiceStatus:
    """The answer of GET /status of a service."""

    failed: str | None  # why the service failed; None while it runs
    engines: tuple[EngineInfo, ...]

    def engines_of(self, model: str) -> list[EngineInfo]:
        """Returns the engines of a served model; of "" those that sample."""
        return [engine for engine in self.engines if engine.model == model]


class ServiceControl:
    """Talks to the control endpoint of a running service. Every call raises ServiceUnreachable
    without an answer."""

    def __init__(self, url: str, api_key: str):
        self.url, self.api_key = url, api_key
        self._http = httpx.Client(
            base_url=url,
            timeout=CONTROL_TIMEOUT_S,
            trust_env=False,
            verify=url.startswith("https"),  # loading certificates takes 50 ms
            headers=bearer(api_key),
            limits=_NO_IDLE_CONNECTIONS,
        )

    def status(self) -> ServiceStatus:
        """Returns the present state of every engine."""
        answer = self._call("GET", "/status", limit_s=_STATUS_TIMEOUT_S)
        # another program may have the port of a service that was killed
        problem = f"{self.url} is no rollout service"
        with translated(problem, msgspec.DecodeError, raised=ServiceUnreachable):
            return msgspec.json.decode(answer.content, type=ServiceStatus)

    def healthy_status(self) -> ServiceStatus:
        """Returns `status`. Raises ServiceFailed if the service has failed."""
        status = self.status()
        if status.failed:
            raise ServiceFailed(f"the rollout service at {self.url} failed: {status.failed}")
        return status

    def engines(self) -> list[EngineInfo]:
        """Returns the state of every engine that samples. Raises ServiceFailed if the service has
        failed, ServiceUnreachable after UNREACHABLE_S."""
        return _patiently(self.healthy_status).engines_of("")

    def report(
        self, event: EngineEvent, engines: Mapping[str, int], weight_version: int = 0
    ) -> set[str]:
        """Reports an event of incarnations, by engine id, all in one request. Returns the ids of
        those that have ended. Raises ServiceUnreachable after UNREACHABLE_S.

        ready: `weight_version` is verified, and they serve from now on.
        """
        body = {"incarnations": dict(engines), "weight_version": weight_version}
        # repeated, it is the same
        answer = _patiently(lambda: self._call("POST", f"/engines/{event}", body))
        return set(answer.json()["ended"])

    def sleep(self, limit_s: float) -> None:
        """Makes all engines release their GPUs' memory; returns when they have, those that are
        starting included.

        limit_s: timeout in seconds. Engines that die from now on restart after `let_start`.
        """
        _patiently(lambda: self._call("POST", "/sleep", limit_s=limit_s))

    def let_start(self) -> None:
        """Allows engines that died during sleep to restart."""
        _patiently(lambda: self._call("POST", "/may_start"))

    def add_engine(self) -> str:
        """Starts one more engine, which samples once the trainers have published weights to it.
        Returns its id."""
        return self._call("POST", "/engines").json()["id"]

    def drain_engine(self, engine_id: str) -> None:
        """Removes an engine after it has finished its requests in flight.

        Raises ValueError if it is unknown or too few would remain.
        """
        answer = self._call("POST", f"/engines/{engine_id}/drain")
        if answer.status_code == 409:
            raise ValueError(f"{engine_id} cannot be drained: {answer.text}")

    def _call(
        self, method: str, path: str, body: dict | None = None, limit_s: float = CONTROL_TIMEOUT_S
    ) -> httpx.Response:
        try:
            answer = self._http.request(method, path, json=body, timeout=limit_s)
        except httpx.TransportError as exc:
            raise ServiceUnreachable(
                f"no rollout service answers at {self.url} ({type(exc).__name__}: {exc}); is "
                "`megagrpo serve` running, and can this machine reach it?"
            ) from exc
        if answer.status_code == 401:
            raise ServiceUnreachable(
                f"{self.url} refuses the API key, which is that in the "
                f"run's service.key or in {environment.API_KEY}"
            )
        if answer.status_code == 409:  # the caller decides
            return answer
        if answer.is_error:
            raise ServiceUnreachable(
                f"{method} {self.url}{path} answered {answer.status_code}: {answer.text[:500]}"
            )
        return answer


def _patiently(ask: Callable[[], T]) -> T:
    """Returns what `ask` returns once the service answers; trainers outlive one lost connection."""
    until = time.monotonic() + UNREACHABLE_S
    while time.monotonic() < until:
        with suppress(ServiceUnreachable):
            return ask()
        time.sleep(_AGAIN_S)
    return ask()


def find_service(run_dir: Path, url: str | None = None, timeout_s: float = 0.0) -> ServiceControl:
    """Returns the service of this run, or the one at `url`, once it answers: a killed service may
    have left its file.

    The key comes from the environment, else from the run folder. Raises ServiceUnreachable after
    `timeout_s` seconds.
    """
    folder = RunFolder(run_dir)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            where = url or json.loads(folder.service.read_text())["url"]
            control = ServiceControl(
                where, environment.get(environment.API_KEY) or folder.service_key.read_text()
            )
            control.status()
            return control
        except FileNotFoundError as exc:
            problem = f"{exc.filename} did not appear"
            if url:
                problem += f" (nor is {environment.API_KEY} set)"
        except ServiceUnreachable as exc:
            problem = (
                f"{url or folder.service} is of a service that is gone ({exc}), and no new one came"
            )
        if time.monotonic() > deadline:
            raise ServiceUnreachable(
                f"{problem} in {timeout_s:.0f} s: `megagrpo serve` has not started its engines"
            )
        time.sleep(0.2)


def service_progress(folder: RunFolder) -> str:
    """Returns the message of a run's service about its start."""
    with suppress(FileNotFoundError):
        return folder.service_progress.read_text()
    return "the service starts"


def bearer(api_key: str) -> dict[str, str]:
    """Returns the HTTP headers that carry the key of a run."""
    return {"Authorization": f"Bearer {api_key}"}
