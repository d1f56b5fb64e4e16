"""`megagrpo bisect` against real engines: it names the point of planted mistakes, and nothing in healthy pairs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from bisect_pairs import Tensors, bisect_cases, changed_copy, noisy, swapped, with_config
from run_megagrpo import make_inputs, succeed, write_experiment
from tiny_model import make_tiny_model
from transport_cases import ENGINES, FAMILIES, ListedEngines, make_model, running_engines

pytestmark = pytest.mark.verifies(
    "weights",
    "`megagrpo bisect` names planted mistakes, passes healthy pairs; bfloat16 not run",
    see="[table](../bisect.md#planted-mistakes)",
)

PROJECTION = "model.layers.1.self_attn.o_proj.weight"


@dataclass(frozen=True)
class Planted:
    """One mistake, in the actor, and what must be said of it."""

    point: str | None
    computed: str | None  # the first computed value that differs
    words: tuple[str, ...]  # of the verdict
    tensors: Callable[[Tensors], None] | None = None
    config: Callable[[dict], None] | None = None
    mistake: str = ""  # in what the actor computes, see bisect_pairs.py
    stale: bool = False  # the engine has the weights of the version before


OF_PROJECTION = (PROJECTION, "the first difference is output projection of attention of layer 1")
OF_ROTARY = ("equal up to normed keys of layer 0", "rotary")  # 1e4 in the model
OF_NORM = ("norm before attention of layer 0", "epsilon")  # 1e-6 in the model
EXPERTS = ("layers.1.mlp.experts.0.", "layers.1.mlp.experts.1.")
OF_EXPERTS = ("model.layers.1.mlp.experts", "MLP or experts of layer 1")
PLANTED = {
    "nothing": Planted(None, None, ("nothing differs",)),
    "a perturbed weight": Planted("weights", "layers.1.attention_out", OF_PROJECTION, tensors=noisy(PROJECTION)),
    "a wrong rope theta": Planted(*["layers.0.q_rotary"] * 2, OF_ROTARY, config=with_config(rope_theta=1e6)),
    "a wrong norm epsilon": Planted(*["layers.0.input_norm"] * 2, OF_NORM, config=with_config(rms_norm_eps=1e-5)),
    "swapped experts": Planted("weights", "layers.1.mlp_out", OF_EXPERTS, tensors=swapped(*EXPERTS)),
    "a bf16 head": Planted("head", "head", ("output layer",), mistake="a bf16 head"),
    "stale weights": Planted("weights", "embedding", ("version 3, the trainers have 4",), stale=True),
}
IN_EVERY_RUN = ("nothing", "a perturbed weight", "a wrong rope theta")
# tensor, without ".weight" -> the point at which a change of 5 % shows first
PERTURBED = {
    "model.embed_tokens": "embedding", "model.layers.0.input_layernorm": "layers.0.input_norm",
    "model.layers.1.self_attn.k_proj": "layers.1.qkv", "model.layers.0.self_attn.q_norm": "layers.0.q_norm",
    "model.layers.1.self_attn.k_norm": "layers.1.k_norm", "model.layers.0.self_attn.o_proj": "layers.0.attention_out",
    "model.layers.1.post_attention_layernorm": "layers.1.mlp_norm", "model.layers.1.mlp.gate": "layers.1.router_logits",
    "model.layers.0.mlp.experts.3.down_proj": "layers.0.mlp_out", "model.norm": "final_norm", "lm_head": "head",
}  # fmt: skip
LEAST_MARGIN = 2.0  # of a bound over the difference of a healthy pair


@pytest.mark.parametrize("names", [IN_EVERY_RUN, pytest.param(tuple(PLANTED), marks=pytest.mark.slow)], ids=len)
def test_planted_mistakes_are_found_and_named(names, service, pool, tiny_model, tmp_path: Path):
    service.set_version(3)
    cases = []
    for name in names:
        one = PLANTED[name]
        base = make_tiny_model(tmp_path / "other", seed=5) if one.stale else tiny_model
        model = changed_copy(base, tmp_path / str(len(cases)), one.tensors, one.config)
        cases.append({"model": model, "mistake": one.mistake, "version": 4 if one.stale else 3})
    args = (service.wait_alive(), service.control.api_key, 1, tmp_path / "out", cases)
    for name, said in zip(names, pool.run(1, bisect_cases, *args)[0], strict=True):
        one = PLANTED[name]
        assert (said.point, said.computed) == (one.point, one.computed), f"{name}:\n{said.report}"
        assert not [word for word in one.words if word not in said.text], f"{name}: {said.text}"
        assert "Not compared" not in said.report, f"{name}:\n{said.report}"
        # embedding, both halves of two layers, norm, and the output
        assert one.point or said.report.count("| ok |") == 9, said.report


@pytest.mark.slow
def test_a_perturbed_weight_is_named_wherever_it_is(service, pool, tiny_model, tmp_path: Path):
    service.set_version(3)
    models = (changed_copy(tiny_model, tmp_path / name, noisy(f"{name}.weight"), None) for name in PERTURBED)
    cases = [{"model": model, "version": 3} for model in models]
    args = (service.wait_alive(), service.control.api_key, 1, tmp_path / "out", cases)
    found = pool.run(1, bisect_cases, *args)[0]
    for (name, point), said in zip(PERTURBED.items(), found, strict=True):
        assert said.computed == point, f"{name}:\n{said.report}"
        assert said.point == "weights" and name in said.text, said.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "engines", "dtype"),
    [
        *((family, "TP1", "float32") for family in FAMILIES),
        ("qwen3_moe", "TP2xEP2", "float32"),
        *((family, "TP1", "bfloat16") for family in ("qwen3", "qwen3_moe", "deepseek_v3")),
    ],
)
def test_nothing_differs_in_a_healthy_pair(family: str, engines: str, dtype: str, pool, tmp_path: Path):
    """And the bounds leave room: a cluster's models are deeper and wider."""
    model = make_model(tmp_path / family, family)
    layouts = [(1, {})] if dtype == "bfloat16" else [(1, {}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {"cp": 2})]
    with running_engines(model, engines, tmp_path, dtype) as (info,):
        for world, parallel in layouts:
            cases = [{"model": model, "parallel": parallel, "publish": True, "version": 1, "dtype": dtype}]
            folder = tmp_path / "_".join([str(world), *parallel])
            args = (info, ListedEngines.api_key, ENGINES[engines].get("tp", 1), folder, cases, world)
            (said,) = pool.run(world, bisect_cases, *args)[0]
            assert said.point is None, f"{parallel}:\n{said.report}"
            assert engines != "TP1" or "Not compared" not in said.report, f"{parallel}:\n{said.report}"
            assert said.margin > LEAST_MARGIN, f"{parallel}:\n{said.report}"


@pytest.mark.slow
def test_the_command_compares_a_model_and_a_checkpoint(tmp_path: Path):
    config = write_experiment(tmp_path / "run", train={"num_steps": 1}, checkpoint={"every": 1})
    make_inputs(config)
    succeed("run", config)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    for options in ([], ["--checkpoint", checkpoint]):
        done = succeed("bisect", config, "--prompts", "2", "--max-new-tokens", "8", *options)
        assert "nothing differs" in done.stdout and "| ok |" in done.stdout
        for name in ("report.md", "report.json"):
            (tmp_path / "run" / "bisect" / name).unlink()
