"""One rank that loads an FP8 checkpoint, then its bfloat16 twin, and compares. usage: fp8_ranks.py FOLDER

Also what the loading read and held, for bench/fp8_loading.py.
"""

import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path

from tests.dist.workers.host import DEVICE  # comes first: it prepares the host for Megatron

# isort: split

import torch
import torch.distributed as dist

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.certify.measure import OPTIMIZER, joined
from megagrpo.config.schema import ActorConfig, ParallelConfig
from megagrpo.weights.actor_weights import load_initial_weights, read_recorded
from megagrpo.weights.copies.record import record_whole
from megagrpo.weights.hf_folder import HfFolder


class AnonymousMemory:
    """The most anonymous memory of this process while it is entered, in bytes: the files' pages do not count."""

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
    """What load_initial_weights reads and holds, beside the parameters, which have memory before it begins."""
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
    results = []
    for number, job in enumerate(json.loads((folder / "jobs.json").read_text())):
        config = ActorConfig(
            world_size=int(os.environ["WORLD_SIZE"]),
            parallel=ParallelConfig(**job["parallel"]),
            dtype=job["dtype"],
            deadline_s=300.0,
        )
        with joined(
            folder / f"store{number}", config=config, optimizer=OPTIMIZER, model_path=job["model"], device=DEVICE
        ) as actor:
            everyone: list = [None] * actor.mesh.world_size
            dist.all_gather_object(everyone, loading_job(actor, job))
            results.append({"ranks": everyone})
    if os.environ["RANK"] == "0":
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
