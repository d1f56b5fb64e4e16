"""One rank that loads an FP8 checkpoint, then its bfloat16 twin, and compares.

Also what the loading read and held, for bench/fp8_loading.py.
"""

import threading
import time
from pathlib import Path

import torch

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.weights.actor_weights import load_initial_weights, read_recorded
from megagrpo.weights.copies.record import record_whole
from megagrpo.weights.hf_folder import HfFolder
from tests.dist.workers.harness import settings, with_actors


class AnonymousMemory:
    """The most anonymous memory of this process while it is entered, in bytes: the files' pages do
    not count."""

    def __enter__(self) -> "AnonymousMemory":
        self._stop = threading.Event()
        self.before = self.peak = self._now()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def read_from_disk() -> int:
    """Bytes that this process made the machine read from its disks so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def load(actor: MegatronActor, path: str) -> dict:
    """What load_initial_weights reads and holds, beside the parameters, which have memory before it
    begins."""
    hf, parameters = HfFolder(path), actor.parameters()
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(torch.nan)
    recording = record_whole(actor.load_hf, hf.specs, parameters)
    disk = read_from_disk()
    with AnonymousMemory() as memory:
        start = time.monotonic()
        read_recorded(hf, recording, parameters)
        seconds = time.monotonic() - start
    return {
        "bytes_read": hf.bytes_read,
        "bytes_from_disk": read_from_disk() - disk,
        "held": memory.peak - memory.before,
        "share": sum(parameter.nbytes for parameter in parameters.values()),
        "seconds": seconds,
    }


def loading_job(actor: MegatronActor, job: dict) -> dict:
    load_initial_weights(actor, job["twin"])
    twin = {name: parameter.detach().clone() for name, parameter in actor.parameters().items()}
    result = load(actor, job["model"])
    same = [torch.equal(parameter, twin[name]) for name, parameter in actor.parameters().items()]
    load_initial_weights(actor, job["model"])
    again = [torch.equal(parameter, twin[name]) for name, parameter in actor.parameters().items()]
    return result | {"parameters": len(same), "equal": all(same + again)}


def main(folder: Path) -> None:
    def everyones(actor: MegatronActor, job: dict) -> dict:
        return {"ranks": actor.mesh.gather_world(loading_job(actor, job))}

    with_actors(folder, everyones, lambda job: settings({"deadline_s": 300.0} | job))
