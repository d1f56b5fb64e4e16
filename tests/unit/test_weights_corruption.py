"""Whatever a transport might do wrong is found before any sample, and named: every kind of fault,
every transport.

The engine is a fake one around real HTTP and a real group, which loads as SGLang loads DeepSeek-V3:
grouped experts, latent attention, and a router's bias that keeps float32 while all else is
published in bfloat16. Faults are planted between the transfer and the proof.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))


from fake_engine import FakeEngine, OneTrainer, ReceivingEnd, running

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.mesh import LeaderError
from megagrpo.models.table import architecture_of, read_description
from megagrpo.weights.actor_weights import load_initial_weights
from megagrpo.weights.copies.recorder import record_whole
from megagrpo.weights.engines.derived_tensors import derived_tensors, kept_copies
from megagrpo.weights.exchange import TRANSPORTS
from megagrpo.weights.hf_folder import HfFolder
from megagrpo.weights.transports.gather_plan import make_gather_plan, published_specs

pytestmark = pytest.mark.verifies(
    "weights", "a wrong element, a rounded router bias, stale w_kc and w_vc are found and named"
)

EXPERTS, FFN, HIDDEN, VOCAB = 3, 6, 4, 10
HEADS, NOPE, V, RANK, ROPE, Q_RANK = 2, 3, 4, 5, 2, 6
Q_A, KV_A, KV_B, BIAS = ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "gate.e_score_correction_bias")
LATENT = {
    Q_A: (Q_RANK, HIDDEN),
    "q_b_proj": (HEADS * (NOPE + ROPE), Q_RANK),
    BIAS: (EXPERTS,),
    KV_B: (HEADS * (NOPE + V), RANK),
    KV_A: (RANK + ROPE, HIDDEN),
}
SHAPES = {"embed": (VOCAB, HIDDEN), "norm": (HIDDEN,)} | LATENT
for expert in range(EXPERTS):
    SHAPES |= {f"{expert}.gate": (FFN, HIDDEN), f"{expert}.up": (FFN, HIDDEN), f"{expert}.down": (HIDDEN, FFN)}
KEPT = {BIAS: torch.float32}


class ShiftedNorm(nn.Module):
    """Keeps its weight plus 1 too, which its loader computes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(HIDDEN, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("gemma_weight", torch.ones_like(self.weight), persistent=False)

    def load(self, weight: Tensor) -> None:
        self.weight.data.copy_(weight)
        torch.add(self.weight.data, 1.0, out=self.gemma_weight)


class Model(nn.Module):
    """Experts in two parameters; of the two down projections it forgets one that comes without the other."""

    def __init__(self):
        super().__init__()
        sizes = {"embed": (VOCAB, HIDDEN), "q_b_proj": LATENT["q_b_proj"]}
        sizes |= {"w13": (EXPERTS, 2 * FFN, HIDDEN), "w2": (EXPERTS, HIDDEN, FFN)}
        sizes |= {"fused_qkv_a": (Q_RANK + RANK + ROPE, HIDDEN)}
        for name, shape in sizes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False))
        self.norm = ShiftedNorm()
        self.bias = nn.Parameter(torch.zeros(EXPERTS), requires_grad=False)
        self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + V), bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.w_kc = torch.zeros(HEADS, NOPE, RANK, dtype=torch.bfloat16)
        self.w_vc = torch.zeros(HEADS, RANK, V, dtype=torch.bfloat16)

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        targets = {BIAS: self.bias.data, KV_B: self.kv_b_proj.weight.data}
        targets |= {name: getattr(self, name).data for name in ("embed", "q_b_proj")}
        for e in range(EXPERTS):
            gate, up = self.w13.data[e].chunk(2)
            targets |= {f"{e}.gate": gate, f"{e}.up": up, f"{e}.down": self.w2.data[e]}
        down = {name: tensor for name, tensor in weights if name in (Q_A, KV_A)}
        for name, tensor in weights:
            if name == "norm":
                self.norm.load(tensor)
            elif name in targets:
                targets[name].copy_(tensor)
        if len(down) == 2:
            self.fused_qkv_a.data.copy_(torch.cat([down[Q_A], down[KV_A]]))
        self.post_load_weights()

    def post_load_weights(self) -> None:
        keys, values = self.kv_b_proj.weight.unflatten(0, (HEADS, NOPE + V)).split([NOPE, V], dim=1)
        self.w_kc.copy_(keys)
        self.w_vc.copy_(values.transpose(1, 2))

    def state(self) -> dict[str, Tensor]:
        return {
            name: t.clone()
            for name, t in [*self.named_parameters(), *self.named_buffers(), ("w_kc", self.w_kc), ("w_vc", self.w_vc)]
        }


def skip_a_run(new: Model, old: dict[str, Tensor]) -> None:
    new.embed.data.view(-1)[10:23] = old["embed"].view(-1)[10:23]


def flip_one_bit(new: Model, old: dict[str, Tensor]) -> None:
    new.w13.data.view(torch.int16)[1, FFN + 2, 3] ^= 1


def holds(parameter: str, *tensors: str) -> list[str]:
    return [f"parameter {parameter} does not hold HF tensor {tensor}" for tensor in tensors]


# kind -> how it breaks the model, given its state before the transfer; and what the message must name, nothing else
KINDS: dict[str, tuple[Callable[[Model, dict[str, Tensor]], object], list[str]]] = {
    "one flipped element": (flip_one_bit, holds("w13", "1.up")),
    "exchanged experts": (lambda new, old: new.w2.data.copy_(new.w2.data[[2, 1, 0]]), holds("w2", "0.down", "2.down")),
    "a stale shard": (
        lambda new, old: new.w13.data.copy_(old["w13"]),
        holds("w13", *(f"{e}.{part}" for e in range(EXPERTS) for part in ("gate", "up"))),
    ),
    "a skipped run": (skip_a_run, holds("embed", "embed")),
    "a wrong slice order": (
        lambda new, old: new.w13.data[2].copy_(torch.cat(new.w13.data[2].chunk(2)[::-1])),
        holds("w13", "2.gate", "2.up"),
    ),
    "a rounded bias": (lambda new, old: new.bias.data.copy_(new.bias.data.bfloat16()), holds("bias", BIAS)),
    **{
        f"a stale {name}": (
            lambda new, old, name=name: getattr(new, name).copy_(old[name]),
            [f".{name}: not what the live kv_b_proj.weight gives"],
        )
        for name in ("w_kc", "w_vc")
    },
    "a stale shifted norm": (
        lambda new, old: new.norm.gemma_weight.copy_(old["norm.gemma_weight"]),
        ["norm.gemma_weight: not what the live weight gives"],
    ),
}


class Trainer(OneTrainer):
    """Parameters fused by expert."""

    def __init__(self, folder: Path, engine: FakeEngine, transport: str):
        live = {f"fc1.{e}": torch.zeros(2 * FFN, HIDDEN) for e in range(EXPERTS)}
        live |= {name: torch.zeros(SHAPES[name]) for name in SHAPES if not name.endswith((".gate", ".up"))}
        settings = {"rollout": {"dtype": "bfloat16"}, "weights": {"bucket_mb": 4e-4}, "kept": KEPT}
        super().__init__(folder, engine, transport, live, SHAPES, **settings)

    def load(self, hf) -> None:
        for name, tensor in self.live.items():
            part, _, number = name.partition(".")
            tensor.copy_(torch.cat([hf[f"{number}.gate"], hf[f"{number}.up"]]) if part == "fc1" else hf[name])

    def publish_is_refused(self) -> list[str]:
        """What the message names."""
        samples, version = (self.engine.calls.count("/continue_generation"), self.engine.info.weight_version)
        with pytest.raises(LeaderError) as caught:
            self.publish()
        assert self.engine.calls.count("/continue_generation") == samples, "no sample is of these weights"
        assert self.engine.info.weight_version == version
        return sorted(re.findall(r"rank 0: (.*?)(?: \[|$)", str(caught.value), re.MULTILINE))


@pytest.fixture(scope="module", params=sorted(TRANSPORTS))
def trainer(request, tmp_path_factory) -> Iterator[Trainer]:
    """By each transport, connected to an engine that holds its weights."""
    with running(FakeEngine(models=[Model()])) as engine:
        receiving = ReceivingEnd(engine)
        trainer = Trainer(tmp_path_factory.mktemp("trainer"), engine, request.param)
        trainer.publish()
        yield trainer
        trainer.exchange.close()
        assert (receiving.num_buckets > 0) == (request.param == "broadcast")


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_found_and_named_before_any_sample(trainer, kind):
    engine, (plant, named), old = trainer.engine, KINDS[kind], trainer.engine.model.state()
    engine.more["flush"] = lambda body: plant(engine.model, old)  # comes before the proof
    assert trainer.publish_is_refused() == sorted(named)
    del engine.more["flush"]
    samples = engine.calls.count("/continue_generation")
    trainer.publish()  # heals
    assert engine.calls.count("/continue_generation") == samples + 1
    assert engine.info.weight_version == trainer.version


def test_engines_get_the_bias_unrounded_and_both_down_projections_in_one_call(trainer):
    trainer.publish()
    model, live = trainer.engine.model, trainer.live
    assert torch.equal(model.bias, live[BIAS]) and not torch.equal(live[BIAS], live[BIAS].bfloat16().float())
    assert torch.equal(model.fused_qkv_a, torch.cat([live[Q_A], live[KV_A]]).bfloat16())
    assert torch.equal(model.w_kc.flatten(), model.kv_b_proj.weight.view(HEADS, -1, RANK)[:, :NOPE].flatten())


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_an_engine_that_keeps_the_bias_rounded_is_found(transport, tmp_path):
    with running(FakeEngine(models=[Model()])) as engine:
        ReceivingEnd(engine)
        trainer = Trainer(tmp_path, engine, transport)
        trainer.publish()
        engine.model.bias.data = engine.model.bias.data.bfloat16()
        assert trainer.publish_is_refused() == holds("bias", BIAS)
        trainer.exchange.close()


def test_down_projections_in_different_calls_are_found(tmp_path):
    with running(FakeEngine(models=[Model()])) as engine:
        ReceivingEnd(engine)
        trainer = Trainer(tmp_path, engine, "broadcast")
        # as if its plan had them together already
        trainer.exchange._transport._together = {(Q_A, KV_A), (KV_A, Q_A)}
        assert trainer.publish_is_refused() == sorted(holds("fused_qkv_a", Q_A, KV_A))
        trainer.exchange.close()


def test_the_plan_keeps_a_concatenation_in_one_bucket_and_each_bucket_in_one_dtype():
    hf_specs = {name: (shape, torch.float32) for name, shape in LATENT.items()}
    live = {name: torch.zeros(shape) for name, shape in LATENT.items()}
    copies = [record_whole(lambda hf: [live[name].copy_(hf[name]) for name in live], hf_specs, live).copies]
    specs = published_specs(hf_specs, torch.bfloat16, KEPT)

    def buckets(*together: tuple[str, ...]):
        return make_gather_plan(copies, specs, staging_bytes=1, together=together).buckets

    assert [bucket.names for bucket in buckets()] == [(Q_A,), ("q_b_proj",), (KV_B,), (KV_A,), (BIAS,)]
    assert [bucket.names for bucket in buckets((KV_A, Q_A))] == [(Q_A, KV_A), ("q_b_proj",), (KV_B,), (BIAS,)]
    assert [bucket.dtype for bucket in buckets((KV_A, Q_A))] == [torch.bfloat16] * 3 + [torch.float32]
    joined = buckets((KV_A, Q_A), (KV_B, "q_b_proj"), (KV_A, KV_B))
    assert joined[0].names == (Q_A, "q_b_proj", KV_B, KV_A), "groups with a common member are one"
    with pytest.raises(ValueError, match=f"loads {Q_A}, {BIAS} together, which are published in several dtypes"):
        buckets((Q_A, BIAS))


def plain_actor(arch, specs, kept: set[str]) -> SimpleNamespace:
    """Holds the HF tensors as they are, all in bfloat16 but those named."""
    dtypes = {name: torch.float32 if name in kept else torch.bfloat16 for name in specs}
    live = {name: torch.zeros(shape, dtype=dtypes[name]) for name, (shape, _) in specs.items()}
    return SimpleNamespace(
        map_tables=lambda hf: None,
        arch=arch,
        load_hf=lambda hf: [tensor.copy_(hf[name]) for name, tensor in live.items()],
        parameters=lambda: live,
        merged=nullcontext,
        weights_loaded=lambda: None,
    )


def test_an_actor_that_rounds_the_bias_does_not_load(tmp_path):
    folder = tmp_path / "model"
    make_tiny_model(TinyModelConfig(path=str(folder), family="glm4_moe", num_layers=2), seed=0)
    arch = architecture_of(read_description(folder / "config.json"))
    specs = HfFolder(folder).specs
    (bias,) = [name for name in specs if name.endswith("e_score_correction_bias")]
    weights = load_initial_weights(plain_actor(arch, specs, {bias}), folder)
    assert weights.fixed_dtypes == {bias: torch.float32}
    with pytest.raises(AssertionError, match=f"{bias} holds HF tensor {bias} in torch.bfloat16, not in torch.float32"):
        load_initial_weights(plain_actor(arch, specs, set()), folder)


def test_a_ranks_own_sinks_follow_the_weights():
    """SGLang's DeepSeek-V4 copies them in the first forward, wider than the rank's heads."""
    model = nn.Module()
    model.attention = nn.Module()
    model.attention.attn_sink = nn.Parameter(torch.arange(8.0), requires_grad=False)
    model.attention.n_local_heads, model.attention.attn_tp_rank = 4, 1
    model.attention._attn_sink_local = torch.zeros(6)
    [(name, live, expected)] = kept_copies(model)
    assert name == "attention._attn_sink_local"
    live.copy_(expected)
    assert model.attention._attn_sink_local.tolist() == [4.0, 5.0, 6.0, 7.0, 0.0, 0.0]


def test_gates_in_the_order_of_a_kernel_follow_the_live_ones():
    """Qwen3.8-Flash-Next's, which SGLang's first forward on sm_100 copies: an engine would sample with those of the
    start."""
    kernel = Path(torch.__file__).parents[1] / "sglang/kernels/ops/elementwise/hc_mix.py"
    padded = run_path(str(kernel))["permute_pad_up_weight"]
    place = nn.Module()
    place.hc_count, place.input_mix_weight_up = 4, nn.Linear(8, 4 * 16, bias=False)
    place._mix_up_weight_padded = None
    assert not list(kept_copies(place))
    place._mix_up_weight_padded = padded(place.input_mix_weight_up.weight, 4)
    place._eager_prefetch_buffer = torch.empty(3, 16)
    assert not derived_tensors(place), "exchanges refuse matrices that nothing brings up to date"
    before = place._mix_up_weight_padded.data_ptr()
    place.input_mix_weight_up.weight.data.normal_()
    [(name, live, expected)] = kept_copies(place)
    assert name.endswith("_mix_up_weight_padded") and (live != expected).any()
    live.copy_(expected)
    wanted = padded(place.input_mix_weight_up.weight, 4)
    assert torch.equal(place._mix_up_weight_padded, wanted) and wanted.data_ptr() != before
