"""Sparse attention outside the actor: what is refused, what engines on a CPU start from, what an indexer costs."""

import json
from pathlib import Path

import numpy as np
import pytest

from megagrpo.check.problems import check_against_model
from megagrpo.config.schema import ActorConfig, ExperimentConfig
from megagrpo.models.families.sparse_attention import dense_config
from megagrpo.models.table import architecture_of, attention_length, model_problems
from megagrpo.rollout.service.engine_model import as_engines_see_it
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.plan.trainer_memory import layer_cost
from megagrpo.tools.plan.work import model_work
from tests.experiments import ROOT, experiment, setting_problems

FOLDER = ROOT / "configs" / "models" / "GLM-5"
GLM5 = json.loads((FOLDER / "config.json").read_text())
TOPK = 2048


def lengths(prompt: int, response: int, **sections) -> ExperimentConfig:
    data = {"path": "d", "max_prompt_tokens": prompt}
    return experiment(data=data, sampling={"max_response_tokens": response}, **sections)


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        ({"device": "cpu"}, "2049 tokens are sparse (the model's index_topk is 2048), which engines"),
        ({"dtype": "bfloat16", "megatron": {"dsa_kernel_backend": "none"}}, "actor.megatron.dsa_kernel_backend none"),
        ({"dtype": "bfloat16", "transformer_engine": False}, None),
        ({"dtype": "bfloat16"}, None),
    ],
)
def test_longer_samples_need_a_gpu_and_kernels(actor, said):
    float32 = lengths(49, 49, actor={"device": "cuda", "dtype": "float32"})
    (problem,) = check_against_model(float32, GLM5)
    assert "rollout.dtype float32: SGLang's sparse attention" in problem
    found = check_against_model(lengths(49, TOPK - 48, actor=actor), GLM5)
    assert [said in problem for problem in found] == ([True] if said else [])
    assert check_against_model(lengths(49, TOPK - 49, actor=actor), GLM5) == []


def test_an_indexer_is_not_trained_and_a_draft_and_adapters_are_refused():
    for name in ("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"):
        actor = ActorConfig(megatron={name: 1})
        (_, problem), *_ = setting_problems(actor, lengths(1, 1).rollout)
        assert "the indexer is frozen: a choice of keys has no gradient" in problem
    actor = ActorConfig(megatron={"dsa_indexer_topk": 1, "dsa_kernel_backend": "cudnn"})
    ((path, problem),) = setting_problems(actor, lengths(1, 1).rollout)
    assert path[-1] == "dsa_indexer_topk" and "set by model.path" in problem
    returned = lengths(1, 1, rollout={"sglang": {"enable_return_indexer_topk": True}})
    ((_, problem),) = setting_problems(returned.actor, returned.rollout)
    assert problem == "is refused: an indexer's choice is not replayed (docs/experts.md)"
    draft = {"draft": {}}
    (problem,) = check_against_model(lengths(8, 8, actor=draft), GLM5)
    assert "actor.draft is not supported with a glm_moe_dsa model" in problem
    (problem,) = check_against_model(lengths(8, 8, actor={"lora": {"rank": 4}}), GLM5)
    assert "actor.lora" in problem


def test_micro_batches_of_some_context_ranks_are_refused():
    layout = {"world_size": 2, "parallel": {"cp": 2, "dynamic_context": True}}
    (problem,) = check_against_model(lengths(8, 8, actor=layout), GLM5)
    assert "actor.parallel.dynamic_context is not supported with a glm_moe_dsa model" in problem
    v3 = json.loads((ROOT / "configs" / "models" / "DeepSeek-V3-0324" / "config.json").read_text())
    assert check_against_model(lengths(8, 8, actor=layout), v3) == []
    (problem,) = check_against_model(lengths(8, 8, actor=layout | {"megatron": {"apply_rope_fusion": True}}), v3)
    assert "places of another micro-batch's ranks" in problem


def test_engines_on_a_cpu_start_from_a_dense_description(tmp_path: Path):
    run = RunFolder(tmp_path)
    config = experiment(model={"path": str(FOLDER)}, output_dir=str(tmp_path))
    assert as_engines_see_it(config, run) is config, "on GPUs the model's own"
    seen = as_engines_see_it(config, run, cuda=False)
    assert seen.model.path == str(run.engine_model) and seen.model.tokenizer == str(FOLDER)
    found = json.loads((run.engine_model / "config.json").read_text())
    assert found == dense_config(GLM5) | {"num_nextn_predict_layers": 0}
    assert found["model_type"] == "deepseek_v3" and model_problems(found) == []
    assert not [key for key in found if key.startswith("index")]
    with_files = config.model_copy(update={"rollout": config.rollout.model_copy(update={"load_format": "model"})})
    found = "\n".join(check_against_model(with_files, GLM5))
    assert "load_format = model, but without a GPU" in found


def test_an_indexer_costs_its_projections_scores_and_keys():
    arch = architecture_of(GLM5)
    dense = architecture_of(dense_config(GLM5))
    assert arch.indexer is not None and arch.indexer.in_pairs and dense.indexer is None
    work, without = model_work(arch), model_work(dense)
    # 128 numbers in FP8 with one scale, beside a latent of 512 + 64 in bfloat16
    assert work.cache_bytes(8) - without.cache_bytes(8) == 78 * (128 + 4) == work.index_bytes
    shared = GLM5 | {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    assert model_work(architecture_of(shared)).index_bytes == 21 * (128 + 4)
    own = 32 * 128 * 2048 + (128 + 32) * 6144 + 2 * 128  # numbers of an indexer
    assert work.dense - without.dense == 78 * own and work.whole - without.whole == own
    assert list(work.seen(np.array([100, TOPK, 10_000]))) == [100, TOPK, TOPK]
    assert without.seen(10_000) == 10_000
    assert attention_length(arch) > 4 * attention_length(dense), "long samples cost less"
    for tp in (1, 8):
        actor = ActorConfig(world_size=tp, parallel={"tp": tp}, dtype="bfloat16")
        tokens = 4096
        sparse, plain = (layer_cost(of, actor, tokens, True, 1.0) for of in (arch, dense))
        assert sparse.pair_flops == 2 * 32 * 128, "every tensor-parallel rank scores every key"
        assert sparse.chosen_flops == 2 * 64 / tp * (512 + 64 + 512)
        assert sparse.flops - plain.flops == 2 * (own - 256) * tokens / tp
        # of a head: the query before and after its turn, the latent output and the value, for keys
        # and values of its own; and the numbers of the keys
        head = 2 * 576 + 512 + 256 - (192 + 256 + 4 * 256)
        assert sparse.kept - plain.kept == (64 / tp * head * 2 + TOPK * 4) * tokens
