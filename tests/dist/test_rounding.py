"""actor.fake_quantization: the actor computes with what FP8 engines hold, and updates its own
weights.

The independent quantiser of tests/fp8_checkpoint.py makes the engine's weights, of whole matrices;
ranks cut blocks.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.laptop.recipe import TinyModelConfig
from megagrpo.families.table import architecture_of, model_tensors
from megagrpo.tools.certify.tiny_model import hf_config, random_tensors
from megagrpo.weights.hf_folder import HfFolder, write_hf_folder
from tests.dist.cases import BATCHES, LAYOUTS
from tests.dist.workers.launch import run_ranks
from tests.dist.workers.samples import VOCAB
from tests.fp8_checkpoint import quantised

pytestmark = pytest.mark.timeout(900)
FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "glm4_moe")
DRAFTS = ("deepseek_v3", "glm4_moe")
CASES = [  # (model, layout, batch, more)
    ("qwen3_moe", "DP2", "packed", {}),
    ("qwen3_moe", "EP2", "padded", {"recompute": "full"}),
    ("qwen3_moe", "TP2xETP2", "packed", {}),
    ("llama", "TP2+SP", "padded", {}),
    ("llama", "PP2xVPP2", "packed", {}),
    ("llama", "CP2", "packed", {"dtype": "bfloat16"}),
    ("deepseek_v3", "TP2xEP2", "packed", {}),
    ("deepseek_v3", "PP2", "padded", {"draft": {}}),
    ("glm4_moe", "TP2+SP", "packed", {"draft": {}}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Of each family a model whose rows differ in size; NAME.fp8 has what an FP8 engine of it
    computes with."""
    folder = tmp_path_factory.mktemp("rounding")
    for family in FAMILIES:
        sizes = TinyModelConfig(
            path="", family=family, hidden_size=160, num_layers=4, head_dim=32, ffn_size=192
        )
        description = hf_config(sizes) | {"vocab_size": VOCAB}
        if family in DRAFTS:
            description["num_nextn_predict_layers"] = 1
        like = folder / f"{family}.description"
        like.mkdir()
        (like / "config.json").write_text(json.dumps(description))
        arch = architecture_of(description, family in DRAFTS)
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: tensor * torch.logspace(-1, 0, tensor.shape[0])[:, None]
            if tensor.dim() == 2
            else tensor
            for name, tensor in random_tensors(arch, generator).items()
        }
        in_fp8 = {spec.name for spec in model_tensors(arch) if spec.in_fp8}
        for dtype in (torch.float32, torch.bfloat16):
            held = {name: tensor.to(dtype).float() for name, tensor in tensors.items()}
            seen = {
                name: rounded(t).to(dtype).float() if name in in_fp8 else t
                for name, t in held.items()
            }
            for kind, whole in (("", held), (".fp8", seen)):
                write_hf_folder(
                    folder / f"{family}.{dtype}{kind}",
                    iter([whole]),
                    like=like,
                    dtype=torch.float32,
                )
    return folder


def rounded(matrix: Tensor) -> Tensor:
    values, scales = quantised(matrix, (128, 128))
    grid = scales.repeat_interleave(128, 0)[: matrix.shape[0]].repeat_interleave(128, 1)
    return values.float() * grid[:, : matrix.shape[1]]


def job_of(models: Path, case: tuple[str, str, str, dict], out: Path) -> dict:
    model, layout, batch, more = case
    job = {
        "parallel": LAYOUTS[layout],
        **BATCHES[batch],
        "dtype": "float32",
        "distributed": True,
        "updates": 1,
        **more,
    }
    return job | {"model": str(models / f"{model}.torch.{job['dtype']}"), "out": str(out)}


def test_it_computes_with_the_engines_weights_and_updates_its_own(models: Path, tmp_path: Path):
    jobs = []
    for number, case in enumerate(CASES):
        own, engines = (
            job_of(models, case, tmp_path / f"{number}.{whose}") for whose in ("own", "engines")
        )
        jobs += [own | {"fake_quantization": "fp8"}, engines | {"model": own["model"] + ".fp8"}]
    results = run_ranks(2, tmp_path / "ranks", jobs, "rounding_ranks.py")
    assert not any(result["changed"] for result in results), (
        "a forward leaves rounded weights behind"
    )
    for case, own, engines in zip(CASES, jobs[::2], jobs[1::2], strict=True):
        check(str(case), own, engines)


def check(name: str, own: dict, engines: dict) -> None:
    mine, theirs = (torch.load(job["out"]) for job in (own, engines))
    for one, other in (
        (mine["logprobs"], theirs["logprobs"]),
        (mine["reference"], mine["logprobs"]),
    ):
        assert all(map(torch.equal, one, other)), name
    assert mine["loss"] == theirs["loss"], name
    wrong = [
        n
        for n, gradient in theirs["gradients"].items()
        if not torch.equal(gradient, mine["gradients"][n])
    ]
    assert not wrong, (name, wrong)
    wrong = []
    for tensor, after in mine["weights"].items():
        before, of_engine = (HfFolder(job["model"])[tensor].double() for job in (own, engines))
        decay = mine["decay"] if after.dim() > 1 else 1.0
        step, expected = (
            after.double() - decay * before,
            theirs["weights"][tensor].double() - decay * of_engine,
        )
        allowed = 2 * torch.finfo(getattr(torch, own["dtype"])).eps * before.abs().max()
        moved = after.dim() == 1 or torch.any(
            after.double() != before
        )  # bfloat16 has no norm so close to 1
        if not (step - expected).abs().max() <= allowed or not moved:
            wrong.append(tensor)
    assert not wrong, (name, wrong)


def test_an_update_behind_another_rounds_gathered_weights(models: Path, tmp_path: Path):
    """With overlap_param_gather they are whole only when a forward gathers them: same bits as
    without it."""
    case = ("qwen3_moe", "DP2", "packed", {"fake_quantization": "fp8", "updates": 2})
    jobs = [
        job_of(models, case, tmp_path / str(overlap))
        | {
            "ddp": {
                "overlap_grad_reduce": True,
                "overlap_param_gather": overlap,
                "bucket_size": 3000,
            }
        }
        for overlap in (False, True)
    ]
    run_ranks(2, tmp_path / "ranks", jobs, "rounding_ranks.py")
    plain, overlapped = (torch.load(job["out"]) for job in jobs)
    assert plain["loss"] == overlapped["loss"]
    for what in ("gradients", "weights"):
        assert all(
            torch.equal(tensor, overlapped[what][name]) for name, tensor in plain[what].items()
        ), what
