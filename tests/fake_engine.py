"""An SGLang engine without SGLang: its weight calls over real HTTP, around a small torch module and our own loader.

Also the service's record of it, as far as the exchange asks.
"""

import base64
import json
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import make_mesh
from megagrpo.system.environment import WEIGHT_LOADER
from megagrpo.types import EngineInfo
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.copies.recorder import record_whole
from megagrpo.weights.engines import loader as engine_loader
from megagrpo.weights.exchange import Exchange
from megagrpo.weights.hf_folder import HfFolder, write_hf_folder
from tests.experiments import experiment

STARTED = EngineInfo("engine-0", "", "stale", weight_version=None, incarnation=1, restarts=0, pid=1, reason="")


class FusedModel(nn.Module):
    """Two HF tensors in one parameter and one in another, as an engine fuses them."""

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        places = {"gate": self.gate_up.data[:4], "up": self.gate_up.data[4:], "down": self.down.data}
        for name, tensor in weights:
            places[name].copy_(tensor)


@dataclass
class FakeEngine:
    """One engine; `models`: its ranks'. `calls`: the paths asked for. `more`: further paths -> what they do."""

    models: list[nn.Module] = field(default_factory=lambda: [FusedModel()])
    more: dict[str, Callable[[dict], None]] = field(default_factory=dict)
    run: Callable[[nn.Module, list], None] = engine_loader.run
    refuses: str = ""  # a path that answers 400
    calls: list[str] = field(default_factory=list)
    updating: bool = False
    info: EngineInfo = STARTED
    api_key: str = "of a fake engine"

    @property
    def model(self) -> nn.Module:
        return self.models[0]

    def answer(self, path: str, body: dict) -> None:
        """Does what the path says. Raises ValueError for what the engine refuses."""
        self.calls.append(path)
        if path == self.refuses:
            raise ValueError("refused on purpose")
        if path in self.more:
            self.more[path](body)
        elif path == "/begin_weight_update":
            self.updating = True
        elif path == "/end_weight_update":
            if not self.updating:
                raise ValueError("no update was begun")
            self.updating = False
        elif path == "/update_weights_from_tensor":
            assert self.updating and body["load_format"] == WEIGHT_LOADER
            if body["flush_cache"]:
                self.calls.append("flush")
                self.more.get("flush", lambda body: None)(body)
            requests = [pickle.loads(base64.b64decode(payload)) for payload in body["serialized_named_tensors"]]
            ranks = ThreadPoolExecutor(len(self.models))
            answers = [ranks.submit(self.run_rank, *one) for one in zip(self.models, requests, strict=True)]
            for failed in wait(answers, return_when=FIRST_EXCEPTION).done:  # a rank that dies takes the server along
                failed.result()
        elif path == "/update_weights_from_disk":
            assert body["load_format"] == "auto"  # by default SGLang takes that of its start, perhaps "dummy"
            for model in self.models:
                model.load_weights(list(HfFolder(body["model_path"]).items()))

    def run_rank(self, model: nn.Module, request: list) -> None:
        """Runs a call of one rank, whose process computes on the device of its model."""
        device = next(model.parameters()).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.run(model, request)

    # What the exchange asks the service.

    def engines(self) -> list[EngineInfo]:
        return [self.info]

    def report(self, event: str, engines: Mapping[str, int], weight_version: int = 0) -> set[str]:
        if event == "ready":
            self.info = replace(self.info, state="ready", weight_version=weight_version)
        ended = {id for id, incarnation in engines.items() if incarnation != self.info.incarnation}
        if event == "lost":
            self.restart()
        return ended

    def restart(self) -> None:
        """It is started again at once, with random weights."""
        self.updating = False
        for model in self.models:
            for parameter in model.parameters():
                parameter.data = torch.rand_like(parameter)  # of another process
        self.info = replace(self.info, state="stale", weight_version=None, incarnation=self.info.incarnation + 1)


class FakeFleet:
    """The service's record of several fake engines. `lost`: ids reported, in order."""

    api_key = FakeEngine.api_key

    def __init__(self, engines: list[FakeEngine]):
        for number, engine in enumerate(engines):
            engine.info = replace(engine.info, id=f"engine-{number}")
        self.by_id, self.lost = {engine.info.id: engine for engine in engines}, []

    def engines(self) -> list[EngineInfo]:
        return [engine.info for engine in self.by_id.values()]

    def report(self, event: str, engines: Mapping[str, int], weight_version: int = 0) -> set[str]:
        if event == "lost":
            self.lost += engines
        return {id for id, each in engines.items() if self.by_id[id].report(event, {id: each}, weight_version)}


@contextmanager
def running(engine: FakeEngine) -> Iterator[FakeEngine]:
    """Serves it on a free port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, text = 200, b"{}"
            try:
                engine.answer(self.path, body)
            except SystemExit:  # a process that is gone answers nothing
                self.close_connection = True
                return
            except ValueError as exc:
                status, text = 400, str(exc).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    engine.info = replace(engine.info, url=f"http://127.0.0.1:{server.server_port}")
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def write_checkpoint(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """An HF folder of these tensors."""
    like = folder / "like"
    like.mkdir(parents=True)
    (like / "config.json").write_text("{}")
    write_hf_folder(folder / "model", iter([tensors]), like, torch.float32)
    return folder / "model"


class ReceivingEnd:
    """The engine's end of `broadcast`: gloo groups as SGLang makes them; buckets flattened, or tensor by tensor.

    It takes one call after the other. `awaits_next`: it loads a bucket only when the next one's call has arrived.
    """

    def __init__(self, engine: FakeEngine, awaits_next: bool = False):
        self.engine, self.groups, self.num_buckets, self.dies_at = engine, {}, 0, 0
        self.formats, self.awaits_next = [], awaits_next
        self.arrived, self.turn = threading.Semaphore(0), threading.Lock()
        engine.more |= {
            "/init_weights_update_group": self.join,
            "/update_weights_from_distributed": self.take,
            "/destroy_weights_update_group": lambda body: self.groups.pop(body["group_name"]),
        }

    def join(self, body: dict) -> None:
        name, limit, host = body["group_name"], timedelta(seconds=10), body["master_address"]
        store = dist.TCPStore(host, body["master_port"], wait_for_workers=False, timeout=limit)
        keys = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._devices = (limit, [dist.ProcessGroupGloo.create_device(hostname=host)])
        self.groups[name] = dist.ProcessGroupGloo(keys, body["rank_offset"], body["world_size"], options)

    def take(self, body: dict) -> None:
        self.arrived.release()
        with self.turn:
            self.num_buckets += 1
            if self.num_buckets == self.dies_at:
                self.groups.clear()
                raise OSError("the process is gone")  # the server drops the connection
            forms = zip(body["shapes"], body["dtypes"], strict=True)
            tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in forms]
            self.formats.append(body.get("load_format"))
            flat = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
            values = tensors if self.formats[-1] is None else [flat]
            for part in values:
                self.groups[body["group_name"]].broadcast([part], dist.BroadcastOptions()).wait()
            if self.formats[-1] is not None:
                for part, tensor in zip(flat.split([tensor.nbytes for tensor in tensors]), tensors, strict=True):
                    tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
            if self.awaits_next and self.num_buckets < 3:
                for _ in range(2):  # its own and the next one's
                    assert self.arrived.acquire(timeout=10), "the next call does not wait for the answer to this one"
                self.arrived.release()
            self.engine.model.load_weights(list(zip(body["names"], tensors, strict=True)))


class OneTrainer:
    """One rank with parameters `live`, which `load` fills from HF tensors, and its exchange with fake engines.

    Each publish sends other random weights. settings: sections of the experiment.
    """

    def __init__(self, folder: Path, engine, transport: str, live: dict[str, Tensor], shapes: dict, **settings):
        self.engine, self.live, self.shapes, self.version = engine, live, shapes, 0
        self.draw = torch.Generator().manual_seed(0)
        specs = {name: (tuple(shape), torch.float32) for name, shape in shapes.items()}
        copies = record_whole(self.load, specs, live).copies
        weights = ActorWeights(copies, specs, lambda: live, self.merged, settings.pop("kept", {}))
        sections = {"weights": {}} | settings
        sections["weights"] = {"timeout_s": 20, "bucket_mb": 1e-4} | sections["weights"]
        config = exchange_config(folder, write_checkpoint(folder / "initial", {"norm": torch.zeros(4)}), **sections)
        config = config.model_copy(update={"weights": config.weights.model_copy(update={"transport": transport})})
        mesh = make_mesh(0, 1, torch.device("cpu"), deadline_s=30)
        self.exchange = Exchange(config, mesh, weights, engine, folder)

    def load(self, hf) -> None:
        for name, tensor in self.live.items():
            tensor.copy_(hf[name])

    def merged(self) -> AbstractContextManager[None]:
        return nullcontext()

    def publish(self) -> dict[str, float]:
        self.version += 1
        self.load({name: torch.randn(shape, generator=self.draw) for name, shape in self.shapes.items()})
        return self.exchange.publish(self.version)


def exchange_config(folder: Path, model: Path, **sections) -> ExperimentConfig:
    return experiment(**{"output_dir": str(folder), "model": {"path": str(model)}} | sections)
