"""What needs a second process or thread on one GPU: ranks of one mesh, shared memory, the threads
of a publish."""

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from torch._C

from bench.gpu_kit.figures import Figures, Setting, Unavailable
from megagrpo.mesh import make_mesh
from megagrpo.weights.copies.recorder import Copy
from megagrpo.weights.copies.views import Box, ParameterSlice
from megagrpo.weights.digests.digest import slice_digest
from megagrpo.weights.expected_digests import ExpectedDigests
from megagrpo.weights.transports.protocol import TrainerWeights
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.engine_group import GroupLimits
from megagrpo.weights.wire.handover import Handover, take_batches
from megagrpo.weights.wire.mailbox import Mailbox
from megagrpo.weights.wire.moving import pack
from megagrpo.weights.wire.transfer_messages import Message

_LIMIT_S = 15.0
_BATCHES = 6


def ranks(figures: Figures, setting: Setting) -> None:
    """Two ranks of one mesh on one device: agreement over gloo on the host, digests of what lies on
    the device."""
    wrong = _beside(_rank, setting, lambda store: _rank(setting, store, 0))
    figures.add(
        "digests that differ from one process's",
        wrong,
        "",
        "each rank computes half of them",
        at_most=0,
    )
    figures.add("two ranks agree, sum and exchange objects", "works")


def _rank(setting: Setting, store: TCPStore, rank: int) -> int:
    """Returns how many digests differ from those of all values in this process."""
    device = setting.torch_device()
    # A group with NCCL for CUDA tensors, as trainers have; nothing here may use it: it takes no two
    # ranks on one GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=_LIMIT_S)
    )
    mesh = make_mesh(rank, 2, device, _LIMIT_S)
    assert mesh.from_main(lambda: "object", "send") == "object" and mesh.all_true(True)
    assert mesh.reduce(torch.tensor([rank + 1]), "sum").tolist() == [3] and mesh.gather_world(
        rank
    ) == [0, 1]
    values = _values(setting)
    live = {f"layer{number}": part.to(device) for number, part in enumerate(values.chunk(4))}
    specs = {name: (tuple(part.shape), torch.bfloat16) for name, part in live.items()}
    whole = [Copy(name, (0,), part.size(), name, 0, (1,)) for name, part in live.items()]
    weights = TrainerWeights(
        mesh, specs, [whole, whole], lambda: live, torch.bfloat16, 1 << 20, 1, setting.folder, setting.folder,
        GroupLimits(_LIMIT_S),
    )  # fmt: skip
    digests = ExpectedDigests(weights)
    (numbers,) = digests.add([whole])
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(digests.local()))  # as a publish does
    thread.start()
    thread.join()
    total = digests.total(found[0].cpu())  # over gloo; in a run over NCCL
    expected = [
        int(slice_digest(part.cpu(), Box((0,), tuple(part.shape)))) for part in live.values()
    ]
    wrong = sum(int(total[index]) != value for index, value in zip(numbers, expected, strict=True))
    mesh.gather_world(None)
    dist.destroy_process_group()
    return wrong


def reshard_end(figures: Figures, setting: Setting) -> None:
    """A trainer's end of a link in a thread, as a publish runs it, with the mesh of a run; it meets
    only itself."""
    try:
        from megagrpo.weights.transports.links import Link
        from megagrpo.weights.transports.reshard import SendOrder, _TrainerEnd
    except ModuleNotFoundError as exc:  # of the client of engines
        raise Unavailable(str(exc)) from exc
    mesh = make_mesh(0, 1, setting.torch_device(), _LIMIT_S)
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_LIMIT_S)
    )
    link = Link(
        name="kit",
        url="http://127.0.0.1:1",
        num_ranks=0,
        slot=0,
        kind=0,
        carriers=(),
        store=("127.0.0.1", store.port, "kit"),
        patience_s=_LIMIT_S,
        limits=GroupLimits(_LIMIT_S),
        left_s=_LIMIT_S,
        transfer="",
    )
    end = _TrainerEnd(link, 0, 1, {}, False)
    weights = cast(TrainerWeights, SimpleNamespace(mesh=mesh, parameters=dict))

    def send() -> str:
        end.send(weights, SendOrder([end.turns(mesh.device.type == "cuda")]), 0)
        assert end._group is not None, "it has joined"
        values = torch.ones(1 << 10, device=mesh.device)  # of this thread's device
        end._group.wait([end._group.broadcast(values)], Deadline(_LIMIT_S))
        return str(values.device)

    with ThreadPoolExecutor(1) as pool:
        start = time.perf_counter()
        where = pool.submit(send).result()
        seconds = time.perf_counter() - start
    end.abort()
    figures.add("joins, makes its communicator and sends in a thread", seconds, "s", f"on {where}")


def handover(figures: Figures, setting: Setting) -> None:
    """A trainer rank fills shared memory and an engine rank in another process copies from it."""
    seconds: list[float] = []

    def fill(store: TCPStore) -> int:
        device = setting.torch_device()
        live = {"w": _values(setting).to(device)}
        start = time.perf_counter()
        end = Handover(
            Mailbox(store, "kit"),
            "kit",
            _plan(setting),
            device,
            Deadline(_LIMIT_S),
            _LIMIT_S,
            cut=lambda: "",
        )
        for number in _plan(setting):
            for message, memory in end.start(number):
                pack(message, memory, live)
            end.offer(number)
        end.close()
        seconds.append(time.perf_counter() - start)
        assert not end.lost, end.lost
        return 0

    wrong = _beside(_take, setting, fill)
    figures.add(
        "values that differ after the hand-over", wrong, "", "in the other process", at_most=0
    )
    size = _values(setting).nbytes
    figures.add(
        "hand-over, first use included", size / seconds[0] / 1e9, "GB/s", f"{size / 1e9:.2g} GB"
    )


def _take(setting: Setting, store: TCPStore, rank: int) -> int:
    device, expected = setting.torch_device(), _values(setting)
    live = {"w": torch.zeros_like(expected).to(device)}
    batches = list(_plan(setting).values())
    mailbox = Mailbox(store, "kit")
    take_batches(mailbox, "kit", batches, live, device, Deadline(_LIMIT_S))
    return int((live["w"].cpu() != expected).sum())


def _values(setting: Setting) -> Tensor:
    """Returns the same values [n] in every process."""
    size = setting.of(1 << 28, 1 << 14)
    return (torch.arange(size, dtype=torch.int64) * 2_654_435_761 % 251).bfloat16()


def _plan(setting: Setting) -> dict[int, list[Message]]:
    size = setting.of(1 << 28, 1 << 14) // _BATCHES // 16 * 16
    slices = [ParameterSlice("w", number * size, (size,), (1,)) for number in range(_BATCHES)]
    rest = ParameterSlice(
        "w", _BATCHES * size, (setting.of(1 << 28, 1 << 14) - _BATCHES * size,), (1,)
    )
    return {
        number: [Message(0, number, torch.bfloat16, (one,))]
        for number, one in enumerate([*slices, *([rest] if rest.size[0] else [])])
    }


def _beside(
    body: Callable[[Setting, TCPStore, int], int], setting: Setting, main: Callable[[TCPStore], int]
) -> int:
    """Runs `body` in a second process while `main` runs in this one; returns the sum of their
    results."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork" if setting.device == "cpu" else "spawn")
    child = context.Process(
        target=_second, args=(body, setting, port)
    )  # before this one has threads
    child.start()
    try:
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_LIMIT_S),
        )
        mine = main(store)
        return mine + int(store.get("result"))
    finally:
        child.join(_LIMIT_S)
        with suppress(ProcessLookupError):
            child.kill()


def _second(body: Callable[[Setting, TCPStore, int], int], setting: Setting, port: int) -> None:
    store = TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=_LIMIT_S))
    store.set("result", str(body(setting, store, 1)))
