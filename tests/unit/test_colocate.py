"""Colocated engines without SGLang: what is refused, what `check` says, who releases what, and the shared memory."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from weakref import WeakSet

import aiohttp
import pytest
import torch
from fake_engine import FakeEngine, running
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.actor import update_state
from megagrpo.actor.host_buffer import HostBuffer
from megagrpo.cluster.machine import _devices
from megagrpo.cluster.nodes import Node, run_node
from megagrpo.config.load import load_config
from megagrpo.rollout.control import CONTROL_TIMEOUT_S
from megagrpo.rollout.service import sleep
from megagrpo.rollout.service.engine_command import ServerPlace, engine_settings
from megagrpo.rollout.service.sleep import CACHE, WEIGHTS, EngineMemory, SleepFailed
from megagrpo.tools.explain import explain
from megagrpo.weights.copies.views import ParameterSlice
from megagrpo.weights.transports.ipc import IpcTransport
from megagrpo.weights.transports.reshard_plan import Nearness
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.engine_group import PeerLost
from megagrpo.weights.wire.handover import Handover, take_batches
from megagrpo.weights.wire.mailbox import Mailbox, listening_store, open_mailbox
from megagrpo.weights.wire.shared_buffer import Place, SharedBuffer, open_shared
from megagrpo.weights.wire.transfer_messages import Message
from tests.experiments import QUICKSTART

SETTINGS = ["rollout.colocate=true", "weights.transport=ipc"]
CPU = torch.device("cpu")


def test_engines_beside_trainers_get_less_memory_and_can_release_it():
    config = load_config(QUICKSTART, SETTINGS)
    assert config.rollout.mem_fraction == 0.6 and load_config(QUICKSTART, []).rollout.mem_fraction == 0.85
    assert load_config(QUICKSTART, [*SETTINGS, "rollout.mem_fraction=0.4"]).rollout.mem_fraction == 0.4
    place = ServerPlace(0, "127.0.0.1", 1, "", cuda=False, num_cores=1)
    assert engine_settings(config, place)["enable_memory_saver"] is True
    assert "enable_memory_saver" not in engine_settings(load_config(QUICKSTART, []), place)


def test_an_engine_rank_without_a_trainer_beside_it_is_refused():
    config = load_config(QUICKSTART, [*SETTINGS, "rollout.num_engines=3"])
    with pytest.raises(ValueError, match=r"3 engine ranks .* each of these needs a trainer rank beside it"):
        _devices(config, ["0", "1", "2"])
    config = load_config(QUICKSTART, [*SETTINGS, "rollout.num_engines=2"])
    assert _devices(config, ["4", "5", "6"]) == ({"CUDA_VISIBLE_DEVICES": "4,5"},) * 2


def test_only_a_colocated_run_has_one_launcher_for_both_sides():
    with pytest.raises(ValueError, match="without rollout.colocate trainers and engines have nodes of their own"):
        run_node(load_config(QUICKSTART, []), Node(0, 2, None, "10.0.0.1", 1))


def test_an_engine_rank_takes_the_nearest_holder():
    """Its carrier, else a trainer of its node, else another; where no trainer is beside it there is no plan."""
    near = Nearness([0, 3], ["a", "a", "b", "b"])
    assert near.best_of((0, 1, 2), 0) == (0,) and near.best_of((0, 1, 2), 1) == (2,)
    assert near.best_of((1, 2), 0) == (1,) and near.best_of((0, 1), 1) == (0, 1)
    transport = IpcTransport.__new__(IpcTransport)
    transport._places = [Place("a", "gpu-0"), Place("a", "gpu-1"), Place("b", "gpu-0")]
    engine = SimpleNamespace(places=[Place("b", "gpu-0"), Place("a", "gpu-1")], tp=2)
    assert transport._carriers(engine, 0) == (2, 1)
    engine.places[0] = Place("b", "gpu-7")
    assert transport._carriers(engine, 0) == (2, 1), "ipc beside the trainers, on GPUs of their own"
    engine.places[0] = Place("c", "gpu-0")
    with pytest.raises(ValueError, match="rank 0 runs on node c, where no trainer rank is"):
        transport._carriers(engine, 0)


def test_check_says_what_is_on_a_gpu_when(tmp_path):
    make_tiny_model(TinyModelConfig(path=str(tmp_path / "model"), family="qwen3_moe"), seed=0)
    text = explain(load_config(QUICKSTART, [*SETTINGS, f"model.path={tmp_path / 'model'}"]))
    (most, name) = re.search(r"at most +([\d.]+ \w+) on a GPU, in (\w+)", text).groups()
    lines = dict(re.findall(r"^    (rollout|logprobs|update|publish) +(.*)$", text, re.MULTILINE))
    lines[name] = text.partition(" on a GPU, in ")[2].partition("\n")[0]
    assert sorted(lines) == ["logprobs", "publish", "rollout", "update"]
    assert all(("optimizer" in line and "gradients" in line) == (phase == "update") for phase, line in lines.items())
    awake = {phase for phase, line in lines.items() if "engine's weights" in line}
    assert awake == {"rollout", "publish"} and "engine's cache" in lines["rollout"]
    totals = [line.partition(":")[0] for phase, line in lines.items() if phase != name]
    assert most not in totals, "the largest of them"
    assert "ADVICE   1 engines of tp 1 are 1 ranks beside 2 trainer ranks" in text
    assert "NCCL" in lines["update"]


def test_check_speaks_of_no_gpu_where_there_is_none(tmp_path):
    make_tiny_model(TinyModelConfig(path=str(tmp_path / "model"), family="qwen3_moe"), seed=0)
    text = explain(load_config(QUICKSTART, ["actor.device=cpu", f"model.path={tmp_path / 'model'}"]))
    memory = text.partition("memory     at most ")[2].partition("hardware")[0]
    assert " in a process, in " in memory and "NCCL" not in memory and "GPU" not in memory


def test_an_engine_releases_once_and_takes_back_only_what_it_has_released():
    asked = []
    note = lambda verb: lambda body: asked.append((verb, *body["tags"]))  # noqa: E731
    more = {f"/{verb}_memory_occupation": note(verb) for verb in ("release", "resume")}

    async def through_a_step(url: str) -> None:
        memory = EngineMemory(url, "key", 5.0)
        async with aiohttp.ClientSession() as http:
            await asyncio.gather(memory.release(http), memory.release(http))  # of trainers that died, and of new ones
            await memory.resume(http, WEIGHTS)
            await memory.resume(http, WEIGHTS)
            await memory.release(http)  # the trainers died before the cache was back
            await memory.resume(http, WEIGHTS)
            await memory.resume(http, CACHE)

    with running(FakeEngine(more=more)) as engine:
        asyncio.run(through_a_step(engine.info.url))
        assert engine.calls[:2] == ["/pause_generation", "/abort_request"], "it releases nothing while something runs"
        assert engine.calls.count("/pause_generation") == 2, "each of a thousand ranks asks an engine that sleeps"
        engine.refuses = "/release_memory_occupation"
        with pytest.raises(SleepFailed, match="refuses release_memory_occupation: 400"):
            asyncio.run(through_a_step(engine.info.url))
    both = [("release", CACHE), ("release", WEIGHTS)]
    assert asked == [*both, ("resume", WEIGHTS), ("release", WEIGHTS), ("resume", WEIGHTS), ("resume", CACHE)]


def test_an_engine_that_resumes_nothing_is_given_up_while_its_trainer_waits(monkeypatch):
    """An engine on a GPU may be silent for 300 s, and one request of a trainer waits for all engines."""
    assert sleep._RESUME_S < CONTROL_TIMEOUT_S
    monkeypatch.setattr(sleep, "_RESUME_S", 0.2)
    answers = threading.Event()

    async def resume(url: str) -> None:
        memory = EngineMemory(url, "key", 60.0)
        async with aiohttp.ClientSession() as http:
            await memory.release(http)
            await asyncio.wait_for(memory.resume(http, WEIGHTS), 20)

    more = {"/release_memory_occupation": lambda body: None, "/resume_memory_occupation": lambda body: answers.wait(60)}
    with running(FakeEngine(more=more)) as engine:
        with pytest.raises(SleepFailed, match="resumes no weights within"):
            asyncio.run(resume(engine.info.url))
        answers.set()


READER = """
import json, os, sys, torch
from megagrpo.weights.wire.shared_buffer import open_shared
with open_shared(json.loads(sys.argv[1]), torch.device("cpu")) as values:
    values.add_(1)
    os.kill(os.getpid(), 9)
"""


def test_another_process_sees_the_memory_and_nothing_is_left_when_it_dies():
    before = set(Path("/dev/shm").iterdir())
    buffer = SharedBuffer(64, CPU)
    buffer.values.copy_(torch.arange(64, dtype=torch.uint8))
    assert subprocess.run([sys.executable, "-c", READER, json.dumps(buffer.handle)]).returncode == -9
    assert torch.equal(buffer.values, torch.arange(64, dtype=torch.uint8) + 1)
    left = {path.name for path in set(Path("/dev/shm").iterdir()) - before}
    assert not [name for name in left if name.startswith("torch_")]
    num_bytes, machine, how = buffer.handle
    buffer.close(closed_there=True)
    for where, named in ((machine, "every engine rank on the machine"), ("another", "does not see that one's memory")):
        with pytest.raises(ValueError, match=named), open_shared((num_bytes, where, how), CPU):
            pass


def test_torch_opens_a_cuda_handle_by_what_we_send():
    """No GPU shows it here: the order of arguments is torch's own affair, and was that of torch 2.13 when written."""
    names = list(signature(rebuild_cuda_tensor).parameters)
    opened = ["storage_device", "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad"]
    opened += ["ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required"]
    assert names[:6] == ["tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype"]
    assert names[6:] == opened
    assert callable(torch.UntypedStorage._release_ipc_counter_cuda) and callable(torch.cuda.use_mem_pool)
    assert callable(torch.cuda.memory._set_allocator_settings)


def test_an_engine_rank_that_goes_away_holds_up_nobody():
    store = Mailbox(listening_store("127.0.0.1", 30))
    other = open_mailbox(store.access, 10)
    live = {"a": torch.zeros(40)}
    batches = {n: [Message(0, n, torch.float32, (ParameterSlice("a", 10 * n, (10,), (1,)),))] for n in range(4)}
    cut: list[str] = []

    def taking(of: list) -> None:
        with pytest.raises(PeerLost):  # it waits for a third batch
            take_batches(other, "k", of, live, CPU, Deadline(1.0))

    engine = threading.Thread(target=taking, args=([*list(batches.values())[:2], batches[3]],))
    engine.start()
    hand = Handover(store, "k", batches, CPU, Deadline(1000), 1000.0, lambda: "".join(cut))
    for number in (0, 1):
        for _, values in hand.start(number):
            values.fill_(number + 1)
        hand.offer(number)
    engine.join()
    cut.append("the engine is gone")
    for number in (2, 3):
        hand.start(number)
        hand.offer(number)
    hand.close()
    assert hand.lost == "the engine is gone"
    assert live["a"].tolist() == [1.0] * 10 + [2.0] * 10 + [0.0] * 20


class Counted(HostBuffer):
    """Knows how many bytes all of them hold whenever one is made."""

    alive: ClassVar[WeakSet] = WeakSet()
    held: ClassVar[list[int]] = []

    def __init__(self, sizes: Iterable[int], device: torch.device):
        super().__init__(sizes, device)
        self.alive.add(self)
        self.held.append(sum(sum(each.sizes) for each in self.alive))


def test_offloaded_state_that_has_grown_lies_on_the_host_once(monkeypatch):
    monkeypatch.setattr(update_state, "HostBuffer", Counted)
    weight, moment = torch.arange(8.0), torch.ones(8)
    adam = SimpleNamespace(param_groups=[{"params": [weight]}], state={})
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam)], zero_grad=lambda: None)
    state = update_state.UpdateState([], optimizer, torch.device("cpu"))
    for _ in range(2):  # before the first update, after it
        state.offload()
        state.bring_back()
        adam.state[weight] = {"exp_avg": moment}
    assert torch.equal(weight, torch.arange(8.0)) and torch.equal(moment, torch.ones(8))
    assert max(Counted.held) == weight.nbytes + moment.nbytes, "the old memory was there beside the new"
