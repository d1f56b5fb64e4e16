"""Whatever a transport might do wrong is found before anybody samples, and named: every kind of fault, every transport.

The engine is a fake one around real HTTP and a real group; the faults are planted between the transfer and the proof.
"""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_engine import FakeEngine, running, write_checkpoint
from test_weights_broadcast import ReceivingEnd

from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import LeaderError, make_mesh
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.copies.record import record_copies
from megagrpo.weights.exchange import TRANSPORTS, Exchange

EXPERTS, FFN, HIDDEN, VOCAB = 3, 6, 4, 10
SHAPES = {"embed": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
for expert in range(EXPERTS):
    SHAPES |= {f"{expert}.gate": (FFN, HIDDEN), f"{expert}.up": (FFN, HIDDEN), f"{expert}.down": (HIDDEN, FFN)}
SPECS = {name: (shape, torch.float32) for name, shape in SHAPES.items()}


class ExpertsModel(nn.Module):
    """All experts in one parameter, with gate and up fused, as an engine has them."""

    def __init__(self):
        super().__init__()
        sizes = {"embed": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
        sizes |= {"w13": (EXPERTS, 2 * FFN, HIDDEN), "w2": (EXPERTS, HIDDEN, FFN)}
        for name, shape in sizes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape), requires_grad=False))

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            number, _, part = name.rpartition(".")
            if not number:
                place = getattr(self, name).data
            elif part == "down":
                place = self.w2.data[int(number)]
            else:
                place = self.w13.data[int(number)].view(2, FFN, HIDDEN)[int(part == "up")]
            place.copy_(tensor)


@dataclass(frozen=True)
class Corruption:
    """`plant(new, old)` breaks the model's parameters; `old` holds what they were before the transfer."""

    plant: Callable[[ExpertsModel, dict[str, Tensor]], object]
    named: set[tuple[str, str]]  # (engine's parameter, HF tensor) that the message must name, and no others


def flip_one_bit(new: ExpertsModel, old: dict[str, Tensor]) -> None:
    new.w13.data.view(torch.int32)[1, FFN + 2, 3] ^= 1


def exchange_experts(new: ExpertsModel, old: dict[str, Tensor]) -> None:
    new.w2.data[[0, 2]] = new.w2.data[[2, 0]]


def keep_a_shard(new: ExpertsModel, old: dict[str, Tensor]) -> None:
    new.w13.data[:] = old["w13"]


def skip_a_run(new: ExpertsModel, old: dict[str, Tensor]) -> None:
    new.embed.data.view(-1)[10:23] = old["embed"].view(-1)[10:23]


def exchange_slices(new: ExpertsModel, old: dict[str, Tensor]) -> None:
    new.w13.data[2] = new.w13.data[2].view(2, FFN, HIDDEN).flip(0).view(2 * FFN, HIDDEN)


KINDS = {
    "one flipped element": Corruption(flip_one_bit, {("w13", "1.up")}),
    "exchanged experts": Corruption(exchange_experts, {("w2", "0.down"), ("w2", "2.down")}),
    "a stale shard": Corruption(keep_a_shard, {("w13", f"{e}.{part}") for e in range(3) for part in ("gate", "up")}),
    "a skipped run": Corruption(skip_a_run, {("embed", "embed")}),
    "a wrong slice order": Corruption(exchange_slices, {("w13", "2.gate"), ("w13", "2.up")}),
}


class Trainer:
    """One rank whose parameters are fused by expert, and its exchange."""

    def __init__(self, folder: Path, engine: FakeEngine, transport: str):
        self.engine, self.version = engine, 0
        self.live = {f"fc1.{e}": torch.zeros(2 * FFN, HIDDEN) for e in range(EXPERTS)}
        self.live |= {
            name: torch.zeros(SHAPES[name]) for name in SHAPES if name.rpartition(".")[2] not in ("gate", "up")
        }
        weights = ActorWeights(record_copies(self.load, SPECS, self.live), SPECS, lambda: self.live)
        config = ExperimentConfig.model_validate(
            {
                "name": "t",
                "output_dir": str(folder),
                "model": {"path": str(write_checkpoint(folder / "initial", {"norm": torch.zeros(HIDDEN)}))},
                "data": {"path": "none.jsonl"},
                "weights": {"timeout_s": 20, "bucket_mb": 5e-4, "transport": transport},
            }
        )
        self.exchange = Exchange(config, make_mesh(0, 1, torch.device("cpu"), deadline_s=30), weights, engine, folder)
        self.generator = torch.Generator().manual_seed(0)

    def load(self, hf) -> None:
        for name, tensor in self.live.items():
            part, _, number = name.partition(".")
            if part == "fc1":
                tensor[:FFN].copy_(hf[f"{number}.gate"])
                tensor[FFN:].copy_(hf[f"{number}.up"])
            else:
                tensor.copy_(hf[name])

    def publish(self) -> None:
        """Other weights each time."""
        self.version += 1
        self.load({name: torch.randn(shape, generator=self.generator) for name, shape in SHAPES.items()})
        self.exchange.publish(self.version)


@pytest.fixture(scope="module", params=sorted(TRANSPORTS))
def trainer(request, tmp_path_factory) -> Iterator[Trainer]:
    """By each transport, connected to an engine that holds its weights."""
    with running(FakeEngine(models=[ExpertsModel()])) as engine:
        receiving = ReceivingEnd(engine)
        trainer = Trainer(tmp_path_factory.mktemp("trainer"), engine, request.param)
        trainer.publish()
        yield trainer
        trainer.exchange.close()
        assert (receiving.num_buckets > 0) == (request.param == "broadcast")


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_found_and_named_before_anybody_samples(trainer, kind):
    engine, version = trainer.engine, trainer.version
    old = {name: tensor.clone() for name, tensor in engine.model.named_parameters()}
    samples = engine.calls.count("/continue_generation")
    engine.more["flush"] = lambda body: KINDS[kind].plant(engine.model, old)  # comes before the proof
    with pytest.raises(LeaderError) as caught:
        trainer.publish()
    del engine.more["flush"]
    found = re.findall(r"rank 0: parameter (\S+) does not hold HF tensor (\S+) \[", str(caught.value))
    assert sorted(found) == sorted(KINDS[kind].named), str(caught.value)
    assert engine.calls.count("/continue_generation") == samples and engine.info.weight_version == version
    trainer.publish()  # heals
    assert engine.calls.count("/continue_generation") == samples + 1 and engine.info.weight_version == version + 2
