"""GLM-5 and DeepSeek-V3.2 in the actor: truly sparse attention, 16 of up to 40 keys, against
transformers; the indexer is frozen everywhere.

tests/dist/cases.py lists the layouts that CI runs; `--full` runs every one, in test_actor_families.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megagrpo.models.families.sparse_attention import dense_config
from tests.dist.bounds import within
from tests.dist.cases import BATCHES, LAYOUTS, SPARSE_CI
from tests.dist.figures import LayoutFigures
from tests.dist.test_actor_families import one_rank_jobs
from tests.dist.test_actor_layouts import LOGIT_BOUND, check, jobs_of, problems_of
from tests.dist.workers.launch import TRANSFORMER_ENGINE_POOL, run_ranks, run_transformers

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.verifies(
        "actor",
        "sparse attention of GLM-5 and DeepSeek-V3.2 equals transformers, where it is sparse; their "
        "indexers are loaded, exported and saved bit by bit, and never trained",
    ),
]
MODEL = "glm_moe_dsa"
SHARED = "glm_moe_dsa_shared"
FAULTS = ("other rotary form", "next key", "no choice", "norm without bias")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, layout_figures: LayoutFigures) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    run_transformers(folder, "hf_reference.py", MODEL, "glm_moe_dsa_dense")
    check(folder, 1, one_rank_jobs(folder, MODEL), layout_figures)
    return folder


def test_layouts(one_rank: Path, layout_figures: LayoutFigures):
    check(one_rank, 2, jobs_of(SPARSE_CI, 2, one_rank), layout_figures)


def test_planted_mistakes_are_seen_and_an_update_leaves_indexers_alone(one_rank: Path):
    model = str(one_rank / MODEL)
    jobs = [{"do": "forward", "model": model, "fault": fault} for fault in FAULTS]
    jobs += [{"do": "frozen", "model": model, "dtype": dtype} for dtype in ("float32", "bfloat16")]
    jobs.append({"do": "frozen", "model": model, "fault": "trained"})
    *planted, float32, bfloat16, trained = run_ranks(1, one_rank / "planted", jobs, "sparse_ranks.py")
    off = {fault: result["logits"] for fault, result in zip(FAULTS, planted, strict=True)}
    assert all(error > 1e4 * LOGIT_BOUND for error in off.values()), off
    right = {"tensors": 4 * 5, "whole": True, "unmoved": True, "float32_norms": True}
    right |= {"stepped": [], "trained": [], "with_gradient": []}
    assert float32 == bfloat16 == right
    assert trained == right | {"unmoved": False}


def rewritten(source: Path, name: str, description: Callable, tensor: Callable[[str, Tensor], Tensor | None]) -> Path:
    """A model beside `source` that must compute the same, by other tensors (None: without it)."""
    folder = source.with_name(name)
    for kind in ("", ".gradients"):
        shutil.copytree(f"{source}{kind}", f"{folder}{kind}")
        file = Path(f"{folder}{kind}") / "model.safetensors"
        found = {key: tensor(key, value) for key, value in load_file(file).items()}
        save_file({key: value for key, value in found.items() if value is not None}, file)
    shutil.copy(f"{source}.pt", f"{folder}.pt")
    file = folder / "config.json"
    file.write_text(json.dumps(description(json.loads(file.read_text()))))
    return folder


def in_pairs(name: str, tensor: Tensor) -> Tensor:
    """Rows of an indexer for rotary embedding of neighbors: 8 of 16 numbers turn, in halves in `tensor`."""
    order = [place + late for place in range(4) for late in (0, 4)] + list(range(8, 16))
    if ".indexer.wq_b." in name:
        return tensor.unflatten(0, (8, 16))[:, order].flatten(0, 1).contiguous()
    turned = ".indexer.wk." in name or ".indexer.k_norm." in name
    return tensor[order].contiguous() if turned else tensor


def test_dense_up_to_topk_tokens_and_the_rotary_form_of_published_indexers(one_rank: Path):
    """An engine on a CPU is started as DeepSeek-V3: without an indexer the same model computes the same, if no sequence
    is longer than index_topk. GLM-5's indexers turn neighbors, which transformers does not know."""
    dense = one_rank / "glm_moe_dsa_dense"
    models = [
        dense,
        rewritten(dense, "as_deepseek_v3", dense_config, lambda name, tensor: None if ".indexer." in name else tensor),
        rewritten(one_rank / MODEL, "pairs", lambda hf: hf | {"indexer_rope_interleave": True}, in_pairs),
    ]
    reference = str(one_rank / f"{MODEL}.rank1.pt")
    jobs = [{"do": "forward", "model": str(model), "reference": reference} for model in models]
    for result in run_ranks(1, one_rank / "rewritten", jobs):
        assert problems_of("forward", result) == []


def test_checkpoints_bring_indexers_to_another_layout(one_rank: Path):
    """Loaded without the model's files: only the checkpoint has the indexers then."""
    model, saved = str(one_rank / MODEL), one_rank / "checkpoints"
    job = {"do": "checkpoint", "model": model, "distributed": True}
    once = {**job, "warm": 1, "then": str(one_rank / "one.pt"), "save": str(saved)}
    run_ranks(1, one_rank / "save", [once])
    load = {**job, "load": str(saved / "step_000001"), "then": str(one_rank / "two.pt")}
    run_ranks(2, one_rank / "load", [{**load, "parallel": LAYOUTS["TP2xEP2"]}])
    one, two = (torch.load(one_rank / f"{name}.pt", map_location="cpu") for name in ("one", "two"))
    for number in (10, 11):
        apart = abs(one[f"loss{number}"] - two[f"loss{number}"])
        assert within("loss", apart, 2e-6)


@pytest.mark.slow
def test_megatrons_own_core_chooses_the_same_keys_and_layers_share_choices(one_rank: Path):
    """With Transformer Engine's layers, here the stand-in's: Megatron's absorbed attention over our
    indexer, by its plain code. Its kernels need CUDA. As in GLM-5.2, every second layer sees the
    keys of the one before, also when layers are computed again."""
    run_transformers(one_rank, "hf_reference.py", SHARED)
    reference = str(one_rank / f"{MODEL}.rank1.pt")
    base = {"do": "forward", "model": str(one_rank / MODEL), "reference": reference}
    megatrons = [
        {**base, "parallel": LAYOUTS[layout], **BATCHES[batch]}
        for layout in ("TP2+SP", "CP2", "TP2xEP2")
        for batch in BATCHES
    ]
    base = {**base, "model": str(one_rank / SHARED), "recompute": "full", **BATCHES["packed"]}
    shared = [{**base, "parallel": LAYOUTS[layout]} for layout in ("PP2", "CP2", "TP2+SP")]
    engine = [{**job, "transformer_engine": True} for job in (*megatrons, *shared)]
    found = run_ranks(2, one_rank / "shared", shared)
    found += run_ranks(2, one_rank / "megatrons", engine, pool=TRANSFORMER_ENGINE_POOL)
    for result in found:
        assert problems_of("forward", result) == []
