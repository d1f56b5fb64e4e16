"""Communication that overlaps with computation gives the same bits, with pipeline stages too.

Buckets cut gradients at other places, so that their norm is summed in another order: those of one cut are compared.
"""

from itertools import product
from pathlib import Path

import pytest
import torch

from megagrpo.config.actor import ActorConfig
from megagrpo.models.fields import Kernels, ddp_fields, transformer_defaults
from megagrpo.models.folder import Model
from tests.dist.workers.launch import run_ranks, run_transformers

pytestmark = pytest.mark.verifies("actor", "overlapped reduction and gathering change no bit")

CUDA = Kernels(cuda=True, transformer_engine=False, fused_weight_gradient=False)
ONE, MANY = {"bucket_size": 10**9}, {"bucket_size": 3000}
GRADIENTS = {"overlap_grad_reduce": True}
BOTH = {**GRADIENTS, "overlap_param_gather": True}
ALIGNED = {**BOTH, **MANY, "align_param_gather": True}
MESSAGES = {"overlap_p2p_comm": True}
FREED = {"deallocate_pipeline_outputs": True}
FLUSH = {**MESSAGES, "overlap_p2p_comm_warmup_flush": True}
# on a GPU they are the default
NO_DDP = dict.fromkeys((*BOTH, "align_param_gather"), False)
NO_MESSAGES = dict.fromkeys((*FLUSH, *FREED), False)
# name -> actor.ddp, actor.megatron, and what it must equal
OVERLAPS = {
    "none": ({}, {}, "none"),
    "both, one bucket": ({**BOTH, **ONE}, {}, "none"),
    "gradients": ({**GRADIENTS, **MANY}, {}, "gradients"),
    "both": ({**BOTH, **MANY}, {}, "gradients"),
}
STAGES = {**OVERLAPS, "freed": ({}, FREED, "none"), "everything": ({**BOTH, **MANY}, FREED, "gradients")}
VIRTUAL_STAGES = {
    **OVERLAPS,
    "freed": ({}, FREED, "none"),
    "aligned": (ALIGNED, {}, "gradients"),
    "messages": ({}, MESSAGES, "none"),
    "messages, flush": ({}, FLUSH, "none"),
    "everything": (ALIGNED, MESSAGES, "gradients"),
}
LAYOUTS = {"PP2": ({"pp": 2}, STAGES), "PP2xVPP2": ({"pp": 2, "vpp": 2}, VIRTUAL_STAGES)}
MODELS = {"qwen3": {}, "qwen3_tied": {}, "qwen3_moe": {"ep": 2}}
STREAMS = ("deepseek_v4", "qwen4_exp")  # stages send several residual streams


def check_same_bits(hf_models: Path, folder: Path, world: int, parallel: dict, cases: list[tuple[str, str]]) -> None:
    """Two updates for every (model, name of an overlap) in one layout, against those that they must equal."""
    overlaps = VIRTUAL_STAGES if "vpp" in parallel else STAGES
    jobs = {
        (model, overlap): {
            "do": "two_updates",
            "model": str(hf_models / model),
            "kept": str(folder / f"{model}.{overlap}.pt"),
            "distributed": True,
            "ddp": NO_DDP | overlaps[overlap][0],
            "megatron": NO_MESSAGES | overlaps[overlap][1],
            "budget": 40,
            "parallel": {**parallel, **MODELS.get(model, {})},
        }
        for model, overlap in cases
    }
    results = dict(zip(jobs, run_ranks(world, folder / "ranks", list(jobs.values())), strict=True))
    for (model, overlap), result in results.items():
        settings, _, same = overlaps[overlap]
        assert result["overlaps"] == [bool(settings.get(name)) for name in BOTH]
        assert result["same_on_replicas"] or "ep" in MODELS.get(model, {}), (
            model,
            overlap,
        )  # its ranks share the experts
        assert (result["buckets"] > 3) == (settings.get("bucket_size") == MANY["bucket_size"])
        found, expected = (torch.load(folder / f"{model}.{kind}.pt0", map_location="cpu") for kind in (overlap, same))
        assert found["norms"] == expected["norms"], (model, overlap)
        weights = expected["weights"]
        different = [name for name, tensor in found["weights"].items() if not torch.equal(tensor, weights[name])]
        assert not different, (model, overlap, different[:3])


@pytest.mark.timeout(300)
def test_overlap_changes_no_bit(hf_models, tmp_path):
    cases = [(model, overlap) for model in MODELS for overlap in OVERLAPS if model == "qwen3" or "," not in overlap]
    check_same_bits(hf_models, tmp_path, 2, {}, cases)


@pytest.mark.timeout(300)
def test_overlap_changes_no_bit_with_virtual_stages(hf_models, tmp_path):
    check_same_bits(
        hf_models, tmp_path, 4, LAYOUTS["PP2xVPP2"][0], [("qwen3_tied", name) for name in ("gradients", "everything")]
    )


@pytest.mark.timeout(300)
def test_sent_streams_are_freed_and_change_no_bit(tmp_path):
    run_transformers(tmp_path, "hf_reference.py", *STREAMS)
    check_same_bits(tmp_path, tmp_path, 2, LAYOUTS["PP2"][0], [*product(STREAMS, ("none", "freed"))])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlap_changes_no_bit_with_pipeline_stages(hf_models, tmp_path, layout, model):
    parallel, overlaps = LAYOUTS[layout]
    check_same_bits(hf_models, tmp_path, 4, parallel, [(model, name) for name in overlaps])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_overlaps_on_cuda_is_what_was_compared(layout, hf_models):
    parallel, overlaps = LAYOUTS[layout]
    actor = ActorConfig.model_validate({"world_size": 4, "parallel": parallel})
    ddp, megatron, _ = overlaps["everything"]
    given, on = (ddp_fields(actor, CUDA), transformer_defaults(Model.read(hf_models / "qwen3").arch, actor, CUDA))
    assert {name: True for name in ALIGNED if given.get(name)} | MANY == ddp
    assert {name: True for name in (*FREED, *FLUSH) if on.get(name)} == megatron
