"""`megagrpo bisect` against real engines: it names the place of planted mistakes, and nothing in healthy pairs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from bisect_pairs import bisect_cases, changed_copy, noisy, swapped, with_config
from run_megagrpo import megagrpo, write_experiment
from tiny_model import make_tiny_model
from transport_cases import ENGINES, FAMILIES, ListedEngines, make_model, running_engines

from tests.dist.workers.pool import RankPool

# name -> (change of the tensors, change of config.json, place, the first place where what is computed differs, words)
PROJECTION = "model.layers.1.self_attn.o_proj.weight"
PLANTED = {
    "nothing": (None, None, None, None, ["nothing differs"]),
    "a perturbed weight": (
        noisy(PROJECTION),
        None,
        "weights",
        "layers.1.attention_out",
        [PROJECTION, "the first difference is output projection of attention of layer 1"],
    ),
    "a wrong rope theta": (
        None,
        with_config(rope_theta=1e6),  # of 1e4
        "layers.0.core_attention",
        "layers.0.core_attention",
        ["equal up to normed keys of layer 0", "rotary"],
    ),
    "a wrong norm epsilon": (
        None,
        with_config(rms_norm_eps=1e-5),  # of 1e-6
        "layers.0.input_norm",
        "layers.0.input_norm",
        ["norm before attention of layer 0", "epsilon"],
    ),
    "swapped experts": (
        swapped("layers.1.mlp.experts.0.", "layers.1.mlp.experts.1."),
        None,
        "weights",
        "layers.1.mlp_out",
        ["model.layers.1.mlp.experts", "MLP or experts of layer 1"],
    ),
}
# part of a tensor's name -> where a change of 5 % shows first; the layer has its place in both
PERTURBED = {
    "model.embed_tokens.weight": "embedding",
    **{
        f"model.layers.{layer}.{tensor}.weight": f"layers.{layer}.{place}"
        for layer, tensor, place in [
            (0, "input_layernorm", "input_norm"),
            (1, "self_attn.k_proj", "qkv"),
            (0, "self_attn.q_norm", "q_norm"),
            (1, "self_attn.k_norm", "k_norm"),
            (0, "self_attn.o_proj", "attention_out"),
            (1, "post_attention_layernorm", "mlp_norm"),
            (1, "mlp.gate", "router_logits"),
            (0, "mlp.experts.3.down_proj", "mlp_out"),
        ]
    },
    "model.norm.weight": "final_norm",
    "lm_head.weight": "head",
}


LEAST_MARGIN = 2.0  # of a bound over the difference of a healthy pair


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.stop()


def test_planted_mistakes_are_found_and_named(service, pool, tiny_model, tmp_path: Path):
    service.set_version(3)
    cases = [
        {"model": changed_copy(tiny_model, tmp_path / str(number), tensors, config), "version": 3}
        for number, (tensors, config, *_) in enumerate(PLANTED.values())
    ]
    cases.append({"model": tiny_model, "head": True, "version": 3})
    cases.append({"model": make_tiny_model(tmp_path / "other", seed=5), "version": 4})
    args = (service.wait_alive(), service.control.api_key, 1, tmp_path / "out", cases)
    found = pool.run(1, bisect_cases, *args)[0]
    for (name, (_, _, place, computed, words)), said in zip(PLANTED.items(), found[:-2], strict=True):
        assert (said.place, said.computed) == (place, computed), f"{name}:\n{said.report}"
        assert not [word for word in words if word not in said.text], f"{name}: {said.text}"
    head, stale = found[-2:]
    assert head.place == "head", head.report
    assert (stale.place, stale.computed) == ("weights", "embedding"), stale.report
    assert "version 3, the trainers have 4" in stale.text, stale.text
    healthy = found[0].report
    assert "Not compared" not in healthy, healthy
    assert healthy.count("| ok |") == 15, healthy  # twice embedding, both halves of two layers, norm; and the output


@pytest.mark.slow
def test_a_perturbed_weight_is_named_wherever_it_is(service, pool, tiny_model, tmp_path: Path):
    service.set_version(3)
    cases = [
        {"model": changed_copy(tiny_model, tmp_path / str(number), noisy(name), None), "version": 3}
        for number, name in enumerate(PERTURBED)
    ]
    args = (service.wait_alive(), service.control.api_key, 1, tmp_path / "out", cases)
    found = pool.run(1, bisect_cases, *args)[0]
    for (name, place), said in zip(PERTURBED.items(), found, strict=True):
        assert said.computed == place, f"{name}:\n{said.report}"
        assert said.place == "weights" and name in said.text, said.text


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
            assert said.place is None, f"{parallel}:\n{said.report}"
            assert engines != "TP1" or "Not compared" not in said.report, f"{parallel}:\n{said.report}"
            assert said.margin > LEAST_MARGIN, f"{parallel}:\n{said.report}"
            print(f"{family}, {engines}, {dtype}, trainers {parallel}: bounds / {said.margin:.1f}, {said.largest}")


@pytest.mark.slow
def test_the_command_compares_a_model_and_a_checkpoint(tmp_path: Path):
    config = write_experiment(tmp_path / "run", train={"num_steps": 1}, checkpoint={"every": 1})
    for command in ("prepare", "run"):
        done = megagrpo(command, config)
        assert done.status == 0, done.stderr
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    for options in ([], ["--checkpoint", checkpoint]):
        done = megagrpo("bisect", config, "--prompts", "2", "--max-new-tokens", "8", *options)
        assert done.status == 0, done.stdout + done.stderr
        assert "nothing differs" in done.stdout and "| ok |" in done.stdout
        for name in ("report.md", "report.json", "report.png"):
            (tmp_path / "run" / "bisect" / name).unlink()
