"""Dynamic context parallelism: micro-batches of 1, 2 and 4 ranks in one update equal one rank's, per parameter.

Float32, gloo. Lengths from 16 to 8,192 tokens; the smaller cases have the families whose layers exchange more than
keys and values: latent attention with a draft, gated delta nets.
"""

from pathlib import Path

import pytest

from tests.dist.bounds import bound_of, within
from tests.dist.random_models import write_model, write_random_model
from tests.dist.test_actor_layouts import GRADIENT_BOUND, LOGIT_BOUND, LOSS_BOUND
from tests.dist.workers.launch import run_ranks

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.verifies("actor", "dynamic context parallelism equals one rank's loss, metrics and gradients"),
]
LONG = [16, 8192, 30, 3100, 48, 90, 700, 16, 257, 1500, 64, 20]
SHORT = [16, 120, 33, 7, 64, 18, 40, 25, 9, 70]
SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "ffn_size": 48}
LOSSES = {"balance": 0.3, "z": 0.02}
DYNAMIC = {"cp": 2, "dynamic_context": True}


def compare(folder: Path, model: Path, lengths: list[int], world: int, layouts: list[dict], **more) -> list[dict]:
    """Compares each layout with one rank; returns the results."""
    base = {"model": str(model), "reference": str(folder / "one.pt"), "lengths": lengths, "budget": max(lengths)}
    base |= more
    run_ranks(1, folder / "one", [base | {"write": True}], "dynamic_ranks.py")
    jobs = [base | {"parallel": layout} for layout in layouts]
    results = run_ranks(world, folder / f"world{world}", jobs, "dynamic_ranks.py")
    problems = []
    for layout, result in zip(layouts, results, strict=True):
        bound = bound_of(GRADIENT_BOUND, result["rounding"])
        found = [name for name, apart in result["sums"].items() if not within("loss", apart, 4 * LOSS_BOUND)]
        found += [name for name, apart in result["gradients"].items() if not within("gradient", apart, bound)]
        found += [name for name in ("logprobs", "seen") if not within("logprobs", result[name], LOGIT_BOUND)]
        problems += [f"{layout}: {name}" for name in found + result["missing"]]
    assert not problems, problems
    return results


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    sizes = SMALL | {"family": "qwen3_moe", "expert_ffn_size": 32}
    return write_random_model(tmp_path_factory.mktemp("small"), sizes)


def test_two_ranks_with_a_long_tail(small: Path, tmp_path: Path):
    """Some micro-batches take one rank and some two; a rank never holds more than its share of the longest sample."""
    layouts = [{"cp": 2}, DYNAMIC | {"ep": 2}]
    fixed, dynamic = compare(tmp_path, small, LONG, 2, layouts, router_losses=LOSSES)
    assert set(fixed["contexts"]) == {2} and set(dynamic["contexts"]) == {1, 2}
    assert fixed["most"] == dynamic["most"] == max(LONG) // 2


def test_four_ranks_with_a_long_tail(small: Path, tmp_path: Path):
    [result] = compare(tmp_path, small, LONG, 4, [{"cp": 4, "dynamic_context": True, "ep": 2}])
    assert set(result["contexts"]) == {1, 2, 4} and result["most"] == max(LONG) // 4


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_stages_tensor_and_data_parallel_ranks(small: Path, tmp_path: Path, recompute: str):
    layouts = [DYNAMIC | more for more in ({"pp": 2}, {"tp": 2}, {"ep": 4})]
    results = compare(tmp_path, small, SHORT, 4, layouts, recompute=recompute, router_losses=LOSSES)
    assert all(set(result["contexts"]) == {1, 2} for result in results)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("deepseek_v3", {"recompute": "full"}),
        ("qwen3_5_moe", {}),
        ("nemotron_h", {"recompute": "full"}),
        ("gpt_oss", {"recompute": "full"}),
    ],
)
def test_layers_that_exchange_other_things(tmp_path: Path, family: str, more: dict):
    [result] = compare(tmp_path, write_model(tmp_path / family, family), SHORT, 2, [DYNAMIC], **more)
    assert set(result["contexts"]) == {1, 2}


def test_a_draft_and_replayed_experts(small: Path, tmp_path: Path):
    """What follows a token may lie on another of the ranks that share its sample; experts are found by sample."""
    sizes = {
        "family": "deepseek_v3",
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "draft": True,
    }
    model = write_random_model(tmp_path / "draft", sizes)
    for folder, path, more in (("drafted", model, {"draft": {}}), ("replayed", small, {"routing_replay": "old"})):
        (tmp_path / folder).mkdir()
        [result] = compare(tmp_path / folder, path, SHORT, 2, [DYNAMIC], **more)
        assert set(result["contexts"]) == {1, 2}, folder


def test_virtual_stages_and_replicas_without_a_sample(small: Path, tmp_path: Path):
    sizes = SMALL | {"family": "qwen3_moe", "expert_ffn_size": 32, "num_layers": 4}
    model = write_random_model(tmp_path / "deep", sizes)
    (tmp_path / "staged").mkdir()
    [result] = compare(tmp_path / "staged", model, SHORT, 4, [DYNAMIC | {"pp": 2, "vpp": 2}], router_losses=LOSSES)
    assert set(result["contexts"]) == {1, 2} and len(result["contexts"]) % 2 == 0
    compare(tmp_path, small, [120], 4, [DYNAMIC | {"ep": 2}], router_losses=LOSSES)


def test_adapters(tmp_path: Path):
    model = write_random_model(tmp_path / "dense", SMALL | {"family": "qwen3"})
    [result] = compare(tmp_path, model, SHORT, 2, [DYNAMIC], lora={"rank": 4, "alpha": 8})
    assert set(result["contexts"]) == {1, 2}
