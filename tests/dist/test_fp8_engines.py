"""Trainer ranks publish to engines in FP8: each byte is what an engine's own loader makes of a quantized checkpoint."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_engine import FakeEngine, FakeFleet, exchange_config, running, write_checkpoint

from megagrpo.mesh import LeaderError, Mesh
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.copies.recorder import record_whole
from megagrpo.weights.exchange import Exchange
from tests.dist.workers.launch import run_meshes
from tests.fp8_checkpoint import quantized

HIDDEN, FFN, LATENT = 320, 256, 200  # 2.5 blocks, 2, 1.6
SHAPES = {"embed": (50, HIDDEN), "norm": (HIDDEN,), "kv": (LATENT, HIDDEN)}
SHAPES |= {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
SPECS = {name: (shape, torch.float32) for name, shape in SHAPES.items()}
IN_FP8 = frozenset({"kv", "gate", "up", "down"})
FP8, SCALES = torch.float8_e4m3fn, "_scale_inv"
STEP = 32  # rows of gate, then rows of up, in the trainers' parameter


def hf_tensors(seed: int) -> dict[str, Tensor]:
    """Rows of very different size, a block of zeros, and a tensor so small that its scales are the smallest ones."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    tensors["gate"] *= torch.logspace(-3, 3, FFN)[:, None]
    tensors["up"][:128, :128] = 0
    tensors["kv"] *= 1e-14
    return tensors


def checkpoint(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """These weights as the independent quantizer stores them."""
    stored = {}
    for name, tensor in tensors.items():
        if name in IN_FP8:
            stored[name], stored[name + SCALES] = quantized(tensor, (128, 128))
        else:
            stored[name] = tensor.to(dtype)
    return stored


class ToyActor:
    """A tensor-parallel rank: gate and up in turns in one parameter, down cut by columns, the rest whole."""

    def __init__(self, tp: int, rank: int):
        self.width, self.rank = FFN // tp, rank
        sizes = {"embed": SHAPES["embed"], "norm": SHAPES["norm"], "kv": SHAPES["kv"]}
        sizes |= {"fc1": (2 * self.width, HIDDEN), "fc2": (HIDDEN, self.width)}
        self.live = {name: torch.zeros(size) for name, size in sizes.items()}

    def load(self, hf) -> None:
        for name in ("embed", "norm", "kv"):
            self.live[name].copy_(hf[name])
        begin = self.rank * self.width
        turns = self.live["fc1"].view(-1, 2, STEP, HIDDEN)
        for row, both in enumerate(turns):
            for target, name in zip(both, ("gate", "up"), strict=True):
                target.copy_(hf[name][begin + row * STEP :][:STEP])
        self.live["fc2"].copy_(hf["down"][:, begin : begin + self.width])


class ToyEngine(nn.Module):
    """One of two ranks, as SGLang builds FP8 layers. plain: parameters left in bfloat16."""

    def __init__(self, rank: int, plain: tuple[str, ...] = ()):
        super().__init__()
        self.rank = rank
        half = FFN // 2
        sizes = {"kv": (LATENT, HIDDEN), "gate_up": (2 * half, HIDDEN), "down": (HIDDEN, half)}
        for name, (rows, columns) in sizes.items():
            scales = torch.full((-(-rows // 128), -(-columns // 128)), 7.0)
            self._add(name, torch.zeros(rows, columns, dtype=torch.bfloat16 if name in plain else FP8))
            if name not in plain:
                self._add(name + SCALES, scales)
        for name in ("embed", "norm"):
            self._add(name, torch.zeros(SHAPES[name], dtype=torch.bfloat16))

    def _add(self, name: str, values: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(values, requires_grad=False))

    def load_weights(self, weights) -> None:
        live = {name: parameter.data for name, parameter in self.named_parameters()}
        for name, tensor in weights:
            base = name.removesuffix(SCALES)
            into = live.get(("gate_up" if base in ("gate", "up") else base) + name[len(base) :])
            if into is None:
                continue  # as SGLang, which warns
            if base in ("gate", "up"):
                into = into.chunk(2)[base == "up"]
                into.copy_(tensor.chunk(2)[self.rank])
            elif base == "down":
                into.copy_(tensor.chunk(2, 1)[self.rank])
            else:
                into.copy_(tensor)


def engine_of(**by_rank) -> FakeEngine:
    engine = FakeEngine(models=[ToyEngine(rank, **by_rank) for rank in range(2)])

    def take(body: dict) -> None:
        files = [load_file(file) for file in Path(body["model_path"]).glob("*.safetensors")]
        for model in engine.models:
            model.load_weights([pair for file in files for pair in file.items()])

    engine.more["/update_weights_from_disk"] = take
    return engine


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.data.clone().view(torch.uint8) for name, p in model.named_parameters()}


def differing(engine: FakeEngine, hf: dict[str, Tensor]) -> list[str]:
    """The parameters that do not have the bytes that a rank's own loader makes of the stored checkpoint."""
    wrong = []
    for rank, model in enumerate(engine.models):
        like = ToyEngine(rank)
        like.load_weights(list(checkpoint(hf, torch.bfloat16).items()))
        found, wanted = bits(model), bits(like)
        wrong += [name for name in wanted if not torch.equal(found[name], wanted[name])]
    return wrong


def run_rank(mesh: Mesh, transport: str, delta: bool, folder: Path) -> dict:
    actor, engine, report = ToyActor(mesh.world_size, mesh.rank), engine_of(), {}
    copies = record_whole(actor.load, SPECS, actor.live).copies
    weights = ActorWeights(copies, SPECS, lambda: actor.live, fp8=IN_FP8)
    sections = {
        "rollout": {"tp": 2, "dtype": "bfloat16", "quantization": "fp8"},
        "weights": {"timeout_s": 40, "bucket_mb": 0.05, "transport": transport, "delta": delta},
        "actor": {"device": "cpu"},
    }
    config = exchange_config(folder, folder / "initial/model", **sections)
    turned = hf_tensors(2)
    turned["down"][300, 130] *= -1  # one code of one block
    with ExitStack() as stack:
        if mesh.is_main:
            stack.enter_context(running(engine))
        exchange = Exchange(config, mesh, weights, FakeFleet([engine]), folder)
        stack.callback(exchange.close)
        for version, hf in enumerate([hf_tensors(1), hf_tensors(2), *([turned] if delta else [])], 1):
            actor.load(hf)
            report = exchange.publish(version)
            if mesh.is_main:
                assert not differing(engine, hf)
        exchange.verify()
        for name, where, change in FAULTS:
            live = dict(engine.models[1].named_parameters())[name].data
            before = live.clone()
            change(live.view(torch.uint8) if name == "down" else live)
            with pytest.raises(LeaderError, match=rf"in 1 places:\n.*rank 1: parameter {name} does not hold .*{where}"):
                exchange.verify()
            live.copy_(before)
        exchange.verify()
        assert not any(name.endswith("FP8") for name in exchange._weights.parameters()), "buffers outlive a publish"
    return report


def flip_a_bit(codes: Tensor) -> None:
    codes[300, 5] ^= 1


def take_the_neighbors(scales: Tensor) -> None:
    scales[1, 2] = scales[1, 1]


FAULTS = [
    ("down", r"down \[0:320, 128:256\]", flip_a_bit),
    ("gate_up_scale_inv", r"up_scale_inv \[1:2, 0:3\]", take_the_neighbors),
]


@pytest.mark.parametrize(
    ("world", "transport", "delta"),
    [
        *(pytest.param(*case, False, marks=pytest.mark.slow) for case in ((1, "reshard"), (2, "reshard"), (4, "disk"))),
        (4, "reshard", False),  # 4 ranks cut blocks in halves
        (4, "reshard", True),
        (4, "ipc", False),
    ],
)
def test_engines_hold_what_their_loader_makes_of_a_quantized_checkpoint(tmp_path, world, transport, delta):
    write_checkpoint(tmp_path / "initial", hf_tensors(0))
    reports = run_meshes(world, tmp_path, run_rank, transport, delta, tmp_path, replicas=1)
    assert all(report == reports[0] for report in reports)
    if delta:
        counts = reports[0]["wire_bytes"] - (4 + 1)  # a position and a code
        assert reports[0]["changed"] == 1 and 4 * (reports[0]["messages"] - 1) <= counts < 2000
    elif transport == "reshard":
        parameters = [p for rank in range(2) for p in ToyEngine(rank).parameters()]
        assert reports[0]["wire_bytes"] == sum(p.nbytes for p in parameters), "each byte of the engine once"


def refused(mesh: Mesh, engines: list[dict], folder: Path) -> str:
    actor = ToyActor(1, 0)
    weights = ActorWeights(record_whole(actor.load, SPECS, actor.live).copies, SPECS, lambda: actor.live, fp8=IN_FP8)
    fakes = [engine_of(**settings) for settings in engines]
    rollout = {"tp": 2, "dtype": "bfloat16", "quantization": "fp8", "num_engines": len(fakes)}
    rollout["min_healthy_engines"] = len(fakes)
    sections = {"rollout": rollout, "weights": {"timeout_s": 40}, "actor": {"device": "cpu"}}
    with ExitStack() as stack:
        for fake in fakes:
            stack.enter_context(running(fake))
        exchange = Exchange(
            exchange_config(folder, folder / "initial/model", **sections), mesh, weights, FakeFleet(fakes), folder
        )
        stack.callback(exchange.close)
        with pytest.raises((LeaderError, ValueError)) as caught:
            exchange.publish(1)
    return str(caught.value)


def test_a_layer_in_another_format_stops_the_run_by_its_name(tmp_path):
    write_checkpoint(tmp_path / "initial", hf_tensors(0))
    for number, engines in enumerate([[{"plain": ("kv",)}], [{}, {"plain": ("kv",)}]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "initial").symlink_to(tmp_path / "initial")
        message = "parameter kv is in torch.bfloat16, and HF tensor kv is published in torch.float8"
        assert message in run_meshes(1, folder, refused, engines, folder)[0]
