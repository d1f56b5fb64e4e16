"""What only models with latent attention and a router's bias can get wrong is prevented, and found where it is planted.

The published weights are bfloat16, but the bias, which would route other tokens if it were rounded. The engine is a
fake one that loads as SGLang loads DeepSeek-V3.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_engine import FakeEngine, running, write_checkpoint
from test_weights_broadcast import ReceivingEnd

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import LeaderError, make_mesh
from megagrpo.weights.actor_weights import ActorWeights, load_initial_weights
from megagrpo.weights.copies.record import record_copies
from megagrpo.weights.exchange import TRANSPORTS, Exchange
from megagrpo.weights.hf_folder import HfFolder
from megagrpo.weights.transports.broadcast import BroadcastTransport
from megagrpo.weights.transports.gather_plan import make_gather_plan, published_specs

HEADS, NOPE, V, RANK, ROPE, Q_RANK, HIDDEN, EXPERTS = 2, 3, 4, 5, 2, 6, 8, 7
Q_A, KV_A, KV_B, BIAS = "q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "gate.e_score_correction_bias"
SHAPES = {
    Q_A: (Q_RANK, HIDDEN),
    "q_b_proj": (HEADS * (NOPE + ROPE), Q_RANK),
    BIAS: (EXPERTS,),
    KV_B: (HEADS * (NOPE + V), RANK),
    KV_A: (RANK + ROPE, HIDDEN),
}
SPECS = {name: (shape, torch.float32) for name, shape in SHAPES.items()}
KEPT = {BIAS: torch.float32}


class LatentModel(nn.Module):
    """One layer; what a call brings of the two down projections is forgotten unless it brings both."""

    def __init__(self):
        super().__init__()
        half = {"fused_qkv_a": (Q_RANK + RANK + ROPE, HIDDEN), "q_b_proj": SHAPES["q_b_proj"]}
        for name, shape in half.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False))
        self.bias = nn.Parameter(torch.zeros(EXPERTS), requires_grad=False)
        self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + V), bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.w_kc = torch.zeros(HEADS, NOPE, RANK, dtype=torch.bfloat16)
        self.w_vc = torch.zeros(HEADS, RANK, V, dtype=torch.bfloat16)

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        places = {"q_b_proj": self.q_b_proj, BIAS: self.bias, KV_B: self.kv_b_proj.weight}
        down = {}
        for name, tensor in weights:
            if name in places:
                places[name].data.copy_(tensor)
            else:
                down[name] = tensor
        if len(down) == 2:
            self.fused_qkv_a.data.copy_(torch.cat([down[Q_A], down[KV_A]]))
        self.post_load_weights()

    def post_load_weights(self) -> None:
        keys, values = self.kv_b_proj.weight.unflatten(0, (HEADS, NOPE + V)).split([NOPE, V], dim=1)
        self.w_kc.copy_(keys)
        self.w_vc.copy_(values.transpose(1, 2))


class Trainer:
    """One rank that holds the HF tensors as they are, in float32."""

    def __init__(self, folder: Path, engine: FakeEngine, transport: str):
        self.live = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        copies = record_copies(self.load, SPECS, self.live)
        weights = ActorWeights(copies, SPECS, lambda: self.live, kept=KEPT)
        config = ExperimentConfig.model_validate(
            {
                "name": "t",
                "output_dir": str(folder),
                "model": {"path": str(write_checkpoint(folder / "initial", {BIAS: torch.zeros(EXPERTS)}))},
                "data": {"path": "none.jsonl"},
                "rollout": {"dtype": "bfloat16"},
                "weights": {"timeout_s": 20, "bucket_mb": 4e-4, "transport": transport},
            }
        )
        self.exchange = Exchange(config, make_mesh(0, 1, torch.device("cpu"), deadline_s=30), weights, engine, folder)
        self.engine, self.version, self.generator = engine, 0, torch.Generator().manual_seed(0)

    def load(self, hf) -> None:
        for name, tensor in self.live.items():
            tensor.copy_(hf[name])

    def publish(self) -> None:
        """Other weights each time."""
        self.version += 1
        self.load({name: torch.randn(shape, generator=self.generator) for name, shape in SHAPES.items()})
        self.exchange.publish(self.version)

    def publish_is_refused(self) -> list[str]:
        """The parameters that the message names, each with the HF tensor if there is one."""
        samples, version = self.engine.calls.count("/continue_generation"), self.engine.info.weight_version
        with pytest.raises(LeaderError) as caught:
            self.publish()
        assert self.engine.calls.count("/continue_generation") == samples, "nobody samples from them"
        assert self.engine.info.weight_version == version
        return re.findall(r"rank 0: (?:parameter )?(\S+?:? .*?)(?: \[|$)", str(caught.value), re.MULTILINE)


@pytest.fixture(params=sorted(TRANSPORTS))
def trainer(request, tmp_path) -> Iterator[Trainer]:
    """By each transport, connected to an engine that holds its weights."""
    with running(FakeEngine(models=[LatentModel()])) as engine:
        ReceivingEnd(engine)
        trainer = Trainer(tmp_path, engine, request.param)
        trainer.publish()
        yield trainer
        trainer.exchange.close()


def test_engines_get_the_bias_unrounded_and_both_down_projections_in_one_call(trainer):
    trainer.publish()
    model, live = trainer.engine.model, trainer.live
    assert torch.equal(model.bias, live[BIAS]) and not torch.equal(live[BIAS], live[BIAS].bfloat16().float())
    assert torch.equal(model.fused_qkv_a, torch.cat([live[Q_A], live[KV_A]]).bfloat16())
    assert torch.equal(model.w_kc.flatten(), model.kv_b_proj.weight.view(HEADS, -1, RANK)[:, :NOPE].flatten())


def test_a_rounded_bias_is_found(trainer):
    model = trainer.engine.model
    trainer.engine.more["flush"] = lambda body: model.bias.copy_(model.bias.bfloat16())
    assert trainer.publish_is_refused() == [f"bias does not hold HF tensor {BIAS}"]
    del trainer.engine.more["flush"]
    trainer.publish()  # heals


def test_an_engine_that_keeps_the_bias_rounded_is_found(trainer):
    trainer.engine.model.bias.data = trainer.engine.model.bias.data.bfloat16()
    assert trainer.publish_is_refused() == [f"bias does not hold HF tensor {BIAS}"]


@pytest.mark.parametrize("name", ["w_kc", "w_vc"])
def test_a_stale_absorbed_matrix_is_found(trainer, name):
    model = trainer.engine.model
    old = getattr(model, name).clone()
    trainer.engine.more["flush"] = lambda body: getattr(model, name).copy_(old)
    assert trainer.publish_is_refused() == [f".{name}: not what the live kv_b_proj.weight gives"]
    del trainer.engine.more["flush"]
    trainer.publish()


def test_matrices_that_no_publish_refreshes_are_refused(tmp_path):
    with running(FakeEngine(models=[LatentModel()])) as engine:
        engine.model.w_kc_qrep = engine.model.w_kc.clone()
        with pytest.raises(LeaderError, match=r"w_kc_qrep: no publish brings it .* leave out --dcp-replicate-q-proj"):
            Trainer(tmp_path, engine, "disk").publish()


def test_down_projections_in_different_calls_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(BroadcastTransport, "_follow", lambda self, engines: None)
    with running(FakeEngine(models=[LatentModel()])) as engine:
        ReceivingEnd(engine)
        trainer = Trainer(tmp_path, engine, "broadcast")
        named = [f"fused_qkv_a does not hold HF tensor {name}" for name in (Q_A, KV_A)]
        assert trainer.publish_is_refused() == named
        trainer.exchange.close()


def test_the_plan_keeps_a_concatenation_in_one_bucket_and_each_bucket_in_one_dtype():
    live = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    copies = [record_copies(lambda hf: [live[name].copy_(hf[name]) for name in live], SPECS, live)]
    specs = published_specs(SPECS, torch.bfloat16, KEPT)
    plan = make_gather_plan(copies, specs, bucket_bytes=1)
    assert [bucket.names for bucket in plan.buckets] == [(Q_A,), ("q_b_proj",), (KV_B,), (KV_A,), (BIAS,)]
    plan = make_gather_plan(copies, specs, bucket_bytes=1, together=[(KV_A, Q_A)])
    assert [bucket.names for bucket in plan.buckets] == [(Q_A, KV_A), ("q_b_proj",), (KV_B,), (BIAS,)]
    assert [bucket.dtype for bucket in plan.buckets] == [torch.bfloat16] * 3 + [torch.float32]
    plan = make_gather_plan(copies, specs, bucket_bytes=1, together=[(KV_A, Q_A), (KV_B, "q_b_proj"), (KV_A, KV_B)])
    assert plan.buckets[0].names == (Q_A, "q_b_proj", KV_B, KV_A), "what has a member in common is one"
    with pytest.raises(ValueError, match=f"loads {Q_A}, {BIAS} together, which are published in several dtypes"):
        make_gather_plan(copies, specs, bucket_bytes=1, together=[(Q_A, BIAS)])


class PlainActor:
    """Holds the HF tensors as they are, all in bfloat16 but those named."""

    def __init__(self, specs, kept: set[str]):
        dtypes = {name: torch.float32 if name in kept else torch.bfloat16 for name in specs}
        self.live = {name: torch.zeros(shape, dtype=dtypes[name]) for name, (shape, _) in specs.items()}

    def load_hf(self, hf) -> None:
        for name, tensor in self.live.items():
            tensor.copy_(hf[name])

    def parameters(self):
        return self.live

    def merged(self):
        return nullcontext()

    def weights_loaded(self) -> None:
        pass


def test_an_actor_that_rounds_the_bias_does_not_load(tmp_path):
    make_tiny_model(TinyModelConfig(path=str(tmp_path / "model"), family="glm4_moe", num_layers=2), seed=0)
    specs = HfFolder(tmp_path / "model").specs
    (bias,) = [name for name in specs if name.endswith("e_score_correction_bias")]
    weights = load_initial_weights(PlainActor(specs, {bias}), str(tmp_path / "model"))
    assert weights.kept == {bias: torch.float32}
    with pytest.raises(AssertionError, match=f"{bias} holds HF tensor {bias} in torch.bfloat16, not in torch.float32"):
        load_initial_weights(PlainActor(specs, set()), str(tmp_path / "model"))
