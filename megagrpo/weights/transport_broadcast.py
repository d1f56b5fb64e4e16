"""Through process groups: rank 0 broadcasts flattened buckets to stock /update_weights_from_distributed.

Each engine has a group of its own (rank 0 and the engine's ranks), so one that dies touches no other's transfer. Buckets are
in flight to all engines at once, one bucket at a time.
"""

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo import environment
from megagrpo.weights.engine_client import EngineConnection, EngineDown
from megagrpo.weights.mailbox import listening_store

Each = Callable[[Callable[[EngineConnection], None]], None]
_JOIN_S = 60.0  # the wait for an engine's ranks cannot be cut short when it refuses or dies


class BroadcastTransport:
    def __init__(self, folder: Path, like: Path, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device

    def send(self, version: int, buckets: Iterator[dict[str, Tensor]], each: Each) -> None:
        # Read when a group is made: NCCL's watchdog would end this trainer when an engine dies in a broadcast. `wait` raises then.
        with environment.temporarily("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
            each(lambda engine: engine.group is not None or self._join(engine))
        each(EngineConnection.begin)
        for bucket in buckets:
            flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in bucket.values()])
            dtype = str(self.dtype).removeprefix("torch.")
            body = {
                "names": list(bucket),
                "dtypes": [dtype] * len(bucket),
                "shapes": [list(t.shape) for t in bucket.values()],
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            each(lambda engine, flat=flat, body=body: self._send_bucket(engine, flat, body))
        each(EngineConnection.end)

    def _join(self, engine: EngineConnection) -> None:
        """Make the group of rank 0 and the engine's ranks; both sides block until all have come."""
        name = f"weights-{uuid.uuid4().hex}"  # an engine outlives trainers, and refuses a name that it has seen
        store = listening_store(engine.address, min(_JOIN_S, engine.deadline.seconds))
        body = {
            "master_address": engine.address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": 1 + engine.tp,
            "group_name": name,
            "backend": "nccl" if self.device.type == "cuda" else "gloo",
        }
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(engine.post, "/init_weights_update_group", body)
            try:
                group = _new_group(store, name, 1 + engine.tp, self.device, engine.address)
            except RuntimeError as exc:
                joined.result()  # the engine's own reason is the better one
                raise EngineDown(
                    f"rank 0 waits for the {engine.tp} ranks of {engine} to join group {name}: {exc}"
                ) from exc
            joined.result()
        group.set_timeout(engine.deadline.seconds)
        engine.group = group

    def _send_bucket(self, engine: EngineConnection, flat: Tensor, body: dict) -> None:
        with ThreadPoolExecutor(1) as pool:
            group = engine.group
            request = body | {"group_name": group.name}
            loaded = pool.submit(engine.post, "/update_weights_from_distributed", request, engine.patience)
            # An engine that refused or died will not receive: do not wait for it until the deadline.
            loaded.add_done_callback(lambda answer: answer.exception() and group.abort())
            try:
                group.broadcast(flat, engine.patience)
                loaded.result()
            except RuntimeError as exc:
                engine.close()  # ends the pending half on either side
                if isinstance(exc, EngineDown) or loaded.exception() is None:
                    raise EngineDown(f"rank 0 waits for {engine} to take {body['names'][0]} ...: {exc}") from exc
                raise loaded.exception() from exc


class EngineGroup:
    """Rank 0's end of a group made by SGLang's init_custom_process_group, without torch's global registry of groups.

    The registry is not thread-safe and groups are made and dropped in one thread per engine.
    """

    def __init__(self, name: str, backend, device: torch.device):
        self.name, self._backend, self._device = name, backend, device

    def set_timeout(self, seconds: float) -> None:
        self._backend._set_default_timeout(timedelta(seconds=seconds))

    def broadcast(self, flat: Tensor, timeout_s: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work = self._backend.broadcast([flat], options)
        work.wait(timedelta(seconds=timeout_s))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def abort(self) -> None:
        self._backend.abort()


def _new_group(store, name: str, size: int, device: torch.device, address: str) -> EngineGroup:
    # The prefixes that torch.distributed puts before a group's keys, on the engine's side of the same torch release.
    keys = dist.PrefixStore(f"{device.type}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    timeout = store.timeout
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return EngineGroup(name, dist.ProcessGroupNCCL(keys, 0, size, options), device)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return EngineGroup(name, dist.ProcessGroupGloo(keys, 0, size, options), device)
