"""What `megagrpo bisect` makes of two sides: planted differences are named, noise of right kernels is not."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megagrpo.cli import main
from megagrpo.config.load import load_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.prompts import PromptSet
from megagrpo.models.table import architecture_of
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.bisect import hooks
from megagrpo.tools.bisect.command import experiment_of
from megagrpo.tools.bisect.compare import BOUNDS, Flips, bound_at, compare_points, difference
from megagrpo.tools.bisect.compared_points import Point, Sizes, layer_points, residual_points
from megagrpo.tools.bisect.engine import only_prefills
from megagrpo.tools.bisect.findings import OUTPUT, UNSEEN, Findings, Pass, layer_to_open, verdict, write_findings
from megagrpo.tools.bisect.hooks import Recorder, SeenTokens, Tap
from megagrpo.tools.bisect.sides import Side, from_engine, from_trainer
from megagrpo.tools.certify.tiny_model import TinySizes, hf_config
from megagrpo.weights.engines.loader import engine_end
from tests.experiments import QUICKSTART, experiment, setting_problems

LENGTHS = [9, 14]
SIZES: Sizes = {"tokens": LENGTHS}
TOKENS, EXPERTS = sum(LENGTHS), 8
ARCH = architecture_of(hf_config(TinySizes(hidden_size=16, head_dim=4)))
POINTS = residual_points(ARCH)
INSIDE = {point.name.rpartition(".")[2]: point for point in layer_points(ARCH, 1)}
FLOAT32 = BOUNDS["float32"]
Values = dict[str, Tensor]


def both_sides(points: list[Point] = POINTS) -> tuple[Values, Values]:
    """Engine and trainer: the same but for noise, and the same experts."""
    generator = torch.Generator().manual_seed(0)
    engine: Values = {}
    trainer: Values = {}
    for point in points:
        values = torch.randn(TOKENS, 16, generator=generator)
        near = values * (1 + 1e-7 * torch.randn(TOKENS, 16, generator=generator))
        if point.layout == "map":
            order = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)
            values = torch.zeros(TOKENS, EXPERTS).scatter(1, order[:, :2], 1.0)
            near = values.clone()
        engine[point.name], trainer[point.name] = values, near
    return engine, trainer


def found_in(engine: Values, trainer: Values, points: list[Point] = POINTS) -> Findings:
    differences, flips, notes = compare_points(points, engine, trainer, SIZES, FLOAT32)
    return Findings([], [Pass("x", differences, flips)], notes, LENGTHS, FLOAT32)


def flip(maps: Tensor, token: int) -> None:
    maps[token] = maps[token].roll(1) if (maps[token].roll(1) != maps[token]).any() else 1 - maps[token]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        (None, None),
        ("embedding", None),
        ("layers.0.output", 0),
        ("layers.2.after_attention", 2),
        ("layers.3.output", 3),
        ("final_norm", 3),
    ],
)
def test_the_first_of_several_differences_is_named_and_its_layer_opened(name, layer):
    """Noise of right kernels is no difference; later layers differ too, and take other experts."""
    engine, trainer = both_sides()
    names = [point.name for point in POINTS]
    for later in names[names.index(name) :] if name else []:
        trainer[later] = trainer[later].roll(1, 1) if later.endswith("experts") else trainer[later] * 1.001
    found = found_in(engine, trainer)
    compared = [point for point in POINTS if point.layout != "map"]
    assert [d.name for d in found.passes[0].differences] == [point.name for point in compared]
    assert verdict(found).point == name and layer_to_open([*found.passes, Pass(OUTPUT, [])]) == layer
    before = [point.says for point in compared if names.index(point.name) < names.index(name or names[0])]
    assert not before or f"equal up to {before[-1]}" in verdict(found).text


def test_modules_of_a_layer_are_named_before_its_sum():
    points = layer_points(ARCH, 1)
    assert [point.name.rpartition(".")[2] for point in points] == [
        *("input_norm", "qkv", "q_norm", "k_norm", "q_rotary", "k_rotary", "core_attention", "attention_out"),
        "after_attention",
        *("mlp_norm", "router_logits", "experts", "expert_shares", "mlp_out", "output"),
    ]
    engine, trainer = both_sides(points)
    for later in ("k_rotary", "core_attention", "attention_out", "after_attention", "output"):
        trainer[f"layers.1.{later}"] = trainer[f"layers.1.{later}"] + 0.01
    found = found_in(engine, trainer, points)
    assert verdict(found).point == "layers.1.k_rotary"
    assert "rotary" in verdict(found).text


def test_errors_are_relative_to_the_values_and_bounds_grow_with_depth():
    values = torch.randn(TOKENS, 16, generator=torch.Generator().manual_seed(1))
    for scale in (1e-6, 1.0, 1e6):
        off = difference("x", "x", values * scale, values * scale * (1 + 1e-3), LENGTHS, 1.0)
        assert off.error == pytest.approx(1e-3, rel=1e-2)
    assert bound_at(1e-6, 0) == 1e-6
    assert bound_at(1e-6, 99) == pytest.approx(1e-5)
    values[0] *= 1e4  # the first token of many models is as large as that: it hides no other
    other = values.clone()
    other[LENGTHS[0] + 3] *= 1.1
    off = difference("x", "x", values, other, LENGTHS, 1e-3)
    assert off.beyond and (off.worst_sequence, off.worst_token) == (1, 3)
    other[LENGTHS[0]] *= 1.2
    off = difference("x", "x", values, other, LENGTHS, 1e-3)
    assert (off.worst_sequence, off.worst_token) == (1, 0)
    other[5, 2] = math.nan
    off = difference("x", "x", values, other, LENGTHS, 1e9)
    assert off.beyond and (off.worst_sequence, off.worst_token) == (0, 5)


def test_more_flips_than_near_ties_explain_are_a_difference():
    engine, trainer = both_sides()
    for token in range(0, TOKENS, 2):
        flip(trainer["layers.2.experts"], token)
    found = found_in(engine, trainer)
    assert verdict(found).point == "layers.2.experts"
    assert "bias" in verdict(found).text
    flips = found.passes[0].flips[2]
    assert (flips.tokens, flips.flipped, flips.first) == (TOKENS, 12, (0, 0)) and not replace(flips, flipped=1).beyond
    few = Flips(layer=30, tokens=2, flipped=2, bound=0.3, first=(0, 0))  # of two tokens a handful proves nothing
    assert not few.beyond and replace(few, tokens=40, flipped=30).beyond
    assert layer_to_open(found.passes) == 2


def test_weights_come_first_and_layers_before_the_output():
    engine, trainer = both_sides()
    head = difference("head", "head", torch.ones(TOKENS, 1), torch.zeros(TOKENS, 1), LENGTHS, 1e-6)
    found = found_in(engine, trainer)
    found.passes.append(Pass(OUTPUT, [head]))
    assert verdict(found).point == "head"
    trainer["layers.0.output"] = trainer["layers.0.output"] * 2
    found.passes[0] = found_in(engine, trainer).passes[0]
    assert verdict(found).point == "layers.0.output"
    found.weights = ["live weights differ in 1 parameter:", "engine e0 rank 0: parameter a does not hold HF tensor b"]
    assert verdict(found).point == "weights"
    assert "HF tensor b" in verdict(found).text
    assert verdict(found).computed == "layers.0.output"
    assert "layers.0" not in verdict(replace(found, passes=[])).text


def test_hooks_that_saw_nothing_prove_nothing():
    near = difference("logprobs", "logprobs", torch.ones(TOKENS, 1), torch.ones(TOKENS, 1), LENGTHS, 1e-6)
    blind = Findings([], [Pass("x", []), Pass(OUTPUT, [near])], ["the hooks saw 3 rows of 23"], LENGTHS, FLOAT32)
    said = verdict(blind)
    assert (said.point, said.computed) == (UNSEEN, None)
    assert "the hooks saw 3 rows of 23" in said.text
    assert verdict(replace(blind, passes=[Pass("x", [near])])).point is None


def test_passes_that_decode_are_left_out():
    """An engine that overlaps its work decodes a token of a response that has ended; a long prompt comes in chunks."""
    sizes = [9, 1, 8, 6, 1]
    seen = {"passes": [torch.zeros(n, 2) for n in sizes], "heads": [torch.full((3 * n, 4), n) for n in sizes]}
    once = {"norm": [torch.zeros(1, 2)]}
    found = only_prefills(seen | once, [9, 14])
    assert [int(call[0, 0]) for call in found["heads"]] == [9, 8, 6]
    assert found.keys() == {"heads", "norm"} and len(found["norm"]) == 1
    assert [len(call) for call in only_prefills(seen, [9, 20])["heads"]] == [3 * n for n in sizes]  # unknown which


def test_the_report_is_for_people_and_programs(tmp_path):
    engine, trainer = both_sides()
    trainer["layers.2.output"] = trainer["layers.2.output"] * math.nan
    found = found_in(engine, trainer)
    found.notes.append("q_norm: no such module")
    text = write_findings(tmp_path, found)
    assert (tmp_path / "report.md").read_text() == text
    assert text.count("**differs**") == 1
    assert "q_norm: no such module" in text
    record = json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert record["place"] == "layers.2.output"


def engine_rank(values: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """What hooks saw of two sequences, prefilled one after the other."""
    return {name: list(tensor.split([n * len(tensor) // TOKENS for n in LENGTHS])) for name, tensor in values.items()}


def pieces_of(key: str, values: Tensor, tp_rank: int = 0) -> list[SeenTokens]:
    """A trainer rank's pieces, the sequences of the batch in one micro-batch each, tokens in any order."""
    rows = torch.repeat_interleave(torch.arange(2), torch.tensor(LENGTHS))
    columns = torch.cat([torch.arange(n) for n in LENGTHS])
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(2))
    halves = order.chunk(2)
    return [SeenTokens(key, tp_rank, rows[part], columns[part], values[part]) for part in halves]


def test_both_sides_come_out_in_the_order_of_tokens_and_heads():
    qkv, q_norm, experts = INSIDE["qkv"], INSIDE["q_norm"], INSIDE["experts"]
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(TOKENS, heads, 4, generator=generator) for heads in (4, 2, 2))
    normed, ids = (torch.randn(TOKENS, 4, 4, generator=generator), torch.arange(2).repeat(TOKENS, 1).int())
    ranks = []
    for rank in range(2):  # two heads of queries and one of keys a rank
        own, kv = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
        fused = torch.cat([q[:, own].flatten(1), k[:, kv].flatten(1), v[:, kv].flatten(1)], 1)
        ranks.append(engine_rank({qkv.name: fused, q_norm.name: normed[:, own].reshape(-1, 4), experts.name: ids}))
    engine = from_engine([qkv, q_norm, experts], ranks, SIZES, ARCH)
    pieces = []
    for rank in range(2):  # Megatron keeps a group's queries next to its key and value
        own = slice(2 * rank, 2 * rank + 2)
        group = torch.cat([q[:, own].flatten(1), k[:, rank], v[:, rank]], 1)
        pieces += pieces_of(qkv.name, group, rank) + pieces_of(q_norm.name, normed[:, own].flatten(1), rank)
    maps = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    maps[:, :2] = True
    pieces += pieces_of(experts.name, maps)
    trainer = from_trainer([qkv, q_norm, experts], pieces, SIZES, ARCH)
    assert engine.notes == trainer.notes == []
    for name, values in engine.values.items():
        assert torch.equal(values, trainer.values[name]), name
    assert torch.equal(engine.values[qkv.name], torch.cat([t.flatten(1) for t in (q, k, v)], 1))


def test_shares_are_of_the_chosen_experts_whatever_their_order_and_factor():
    chosen = [INSIDE["experts"], INSIDE["expert_shares"]]
    ids = torch.tensor([[3, 1]]).repeat(TOKENS, 1).int()
    weights = torch.tensor([[0.6, 0.2]]).repeat(TOKENS, 1)
    engine = from_engine(chosen, [engine_rank({chosen[0].name: ids, chosen[1].name: weights})], SIZES, ARCH)
    dense = torch.zeros(TOKENS, EXPERTS)
    dense[:, 3], dense[:, 1] = 1.5, 0.5
    trainer = from_trainer(chosen[1:], pieces_of(chosen[1].name, dense), SIZES, ARCH)
    assert torch.allclose(engine.values[chosen[1].name], trainer.values[chosen[1].name])


def test_what_cannot_be_compared_is_said():
    norm, out = INSIDE["input_norm"], INSIDE["attention_out"]
    seen = engine_rank({norm.name: torch.ones(TOKENS, 16), out.name: torch.ones(TOKENS, 16)})
    side: Side = from_engine([norm, out], [seen, seen], SIZES, ARCH)
    assert side.values.keys() == {norm.name}
    assert "part of a sum" in side.notes[0]
    short = {norm.name: [torch.ones(TOKENS - 1, 16)]}  # a cache has shortened the prefill, or a graph hid a pass
    assert f"saw {TOKENS - 1} rows of {TOKENS}" in from_engine([norm], [short], SIZES, ARCH).notes[0]
    some = pieces_of(norm.name, torch.ones(TOKENS, 16))[:1]
    assert "of 23 tokens" in from_trainer([norm], some, SIZES, ARCH).notes[0]
    assert "no such module" in from_trainer([norm], [], SIZES, ARCH).notes[0]


def test_the_engine_is_one_whose_passes_hooks_can_see(tmp_path):
    shape = ["rollout.num_engines=3", "rollout.colocate=true", "weights.transport=ipc"]
    draft = ["actor.draft={}", "rollout.draft_tokens=2", "rollout.quantization=fp8"]
    config = load_config(str(QUICKSTART), [*shape, *draft])
    eager = experiment_of(config, True, RunFolder(tmp_path))
    assert (eager.rollout.num_engines, eager.rollout.colocate, eager.rollout.load_format) == (1, False, "model")
    assert (eager.output_dir, eager.weights.transport) == (str(tmp_path), "reshard")
    assert (eager.rollout.draft_tokens, eager.rollout.quantization) == (None, None)
    graphs = {name for name, value in eager.rollout.sglang.items() if value == "disabled"}
    assert graphs == {"cuda_graph_backend_decode", "cuda_graph_backend_prefill"}
    assert not list(setting_problems(eager.actor, eager.rollout))
    assert eager.actor.megatron["moe_router_fusion"] is False, "it must accept the engine's experts"
    ExperimentConfig.model_validate(eager.model_dump())


def test_nothing_to_compare_is_refused_before_anything_starts(tmp_path, capsys):
    folder = f"output_dir={tmp_path / 'run'}"
    (tmp_path / "config.json").write_text("{}")
    for options, says in [
        (["--bound", "0"], "--bound 0.0"),
        (["--checkpoint", str(tmp_path / "step_000010")], "no manifest.json"),
        (["--checkpoint", str(tmp_path)], f"--set model.path={tmp_path}"),
    ]:
        assert main(["bisect", str(QUICKSTART), "--set", folder, *options]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


class _Norm(nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor | None = None):
        if residual is None:
            return hidden * 2
        residual += hidden  # in place, as fused kernels do
        return residual * 2, residual


def test_hooks_copy_before_the_next_module_writes_over_it():
    model = nn.ModuleDict({"norm": _Norm()})
    taps = [
        Tap("sum", "norm", "out", 1),
        Tap("in", "norm", "in"),
        Tap("none", "norm", "out", 7),
        Tap("x", "gone", "out"),
    ]
    recorder = Recorder(dict(model.named_modules()), taps)
    assert recorder.missing == ["gone"]
    residual = torch.ones(3)
    model["norm"](torch.ones(3), residual)
    residual.zero_()
    recorder.remove()
    model["norm"](torch.ones(3), residual)
    assert [t.tolist() for t in recorder.seen["sum"]] == [[2.0, 2.0, 2.0]]
    assert [t.tolist() for t in recorder.seen["in"]] == [[1.0, 1.0, 1.0]]
    assert recorder.seen["none"] == []
    assert recorder.problems == ["norm: out 7 is no tensor"]


class _FusedNorm(_Norm):
    def forward_with_allreduce_fusion(self, hidden: Tensor, residual: Tensor | None = None, fused: bool = True):
        return (hidden + residual, hidden * 3) if fused else self(hidden, residual)


@pytest.mark.parametrize("fused", [True, False])
def test_a_norm_that_is_fused_with_an_all_reduce_is_seen_once(fused):
    model = nn.ModuleDict({"norm": _FusedNorm()})
    taps = [Tap("normed", "norm", "out"), Tap("sum", "norm", "out", 1)]
    recorder = Recorder(dict(model.named_modules()), taps)
    normed, total = model["norm"].forward_with_allreduce_fusion(torch.ones(3), torch.ones(3), fused=fused)
    recorder.remove()
    model["norm"].forward_with_allreduce_fusion(torch.ones(3), torch.ones(3), fused=fused)
    assert [t.tolist() for t in recorder.seen["normed"]] == [normed.tolist()]
    assert [t.tolist() for t in recorder.seen["sum"]] == [total.tolist()]


def test_an_engine_runs_the_requests_of_a_tool_that_they_name(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    end, file = engine_end(model), tmp_path / "seen.pt"
    taps = [list(Tap("first", "0", "out")), list(Tap("none", "gone", "out"))]
    request = {"module": hooks.__name__, "operation": "capture", "taps": taps}
    for _ in range(2):  # the second one replaces the first
        assert end.answer(request, None) == {"missing": ["gone"]}
    output = model(torch.ones(1, 2))
    request = {"module": hooks.__name__, "operation": "read", "file": str(file)}
    assert end.answer(request, None) == {"problems": []}
    (seen,) = torch.load(file)["first"]
    assert torch.equal(seen, output)


def test_a_checkpoint_gives_its_weights_only(monkeypatch):
    """One that no layout but the run's can resume has an optimizer state that bisect's ranks could not read."""
    from megagrpo.tools.bisect import ranks

    def load(source, identity, actor, **options):
        raise InterruptedError(source, options)

    monkeypatch.setattr(ranks, "load_checkpoint", load)
    for name in ("model_to_train", "load_tokenizer", "make_actor", "run_identity", "load_initial_weights"):
        monkeypatch.setattr(ranks, name, lambda *_: SimpleNamespace(arch=None))
    monkeypatch.setattr(ranks, "load_prompts", lambda *_: PromptSet([], 0, shuffle=False))
    monkeypatch.setattr(ranks, "ImageStore", SimpleNamespace(of=lambda *_: None))
    with pytest.raises(InterruptedError) as raised:
        ranks.bisect_ranks(experiment(), SimpleNamespace(prompts=1, checkpoint="step_000001"), torch.device("cpu"))
    assert raised.value.args == (Path("step_000001"), {"with_optimizer": False})
