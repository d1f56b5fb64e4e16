"""The families: random tensors stay as they are, refusals go by name, one file and two rows make a new family."""

import hashlib
import json
import shutil
from importlib.util import find_spec

import pytest
import torch

from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import check_against_model, layout_problems, model_to_train
from megagrpo.config.load import load_config
from megagrpo.models.config_json import Rotary
from megagrpo.models.folder import Model
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.table import FAMILIES, architecture_of, model_problems
from megagrpo.models.tensors import Shard
from megagrpo.system.environment import child_environment
from megagrpo.system.torchvision import prepare_torchvision
from megagrpo.tools.certify.tiny_model import hf_config, random_tensors
from tests.experiments import QUICKSTART, ROOT, python

# (family, tied) -> SHA-256 of names, shapes and values in order, of default sizes and seed 7
DIGESTS = {
    ("llama", False): "e4dbcd2118f570ec",
    ("llama", True): "48d3879133d921d2",
    ("qwen2", False): "2a962306623acb29",
    ("qwen2", True): "dce6b3afa2a01395",
    ("qwen3", False): "e290a850dc83ce09",
    ("qwen3", True): "75b95264e32c067d",
    ("qwen3_moe", False): "911ed5d72666db44",
    ("qwen3_moe", True): "4b40db2a44e7b811",
    ("mixtral", False): "69d7cf484c065c90",
    ("glm4_moe", False): "418d5b826b9c4988",
    ("glm4_moe_lite", False): "b5cab126e366b585",
    ("deepseek_v3", False): "b5cab126e366b585",
    ("kimi_k2", False): "b5cab126e366b585",
    ("qwen2_5_vl", False): "b44bbd5758532621",
    ("qwen3_vl", True): "b0a892305c437d03",
    ("qwen3_vl_moe", False): "901941073f111c1c",
    ("minimax_m2", False): "13cd063bc1176d99",
    ("kimi_k25", False): "b5cab126e366b585",
    ("deepseek_v32", False): "5a838abb4acc3aa4",
    ("glm_moe_dsa", False): "5a838abb4acc3aa4",
    ("qwen3_5_moe", False): "7dc3ed828c7be285",
    ("qwen3_5_moe_text", False): "a99c3a5bbd35aa75",
    ("qwen3_5", False): "1cf43c388982de8b",
    ("qwen3_5_text", False): "b16f53c19f6d225f",
    ("qwen3_next", False): "9f7162e55e55a912",
    ("gpt_oss", False): "ca58df43deb194f6",
    ("nemotron_h", False): "2120a0a6ceed6f28",
    ("deepseek_v4", False): "51e646bb71b32a74",
    ("kimi_linear", False): "b1b84402ea5ce5b3",
    ("qwen4_exp", False): "560f8ea460b12559",
    ("glm5_next", False): "8541ce5a28f59a7c",
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
UNSCALED = (
    *("glm4_moe", "deepseek_v3", "kimi_k2", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("minimax_m2", "kimi_k25", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "gpt_oss"),
    *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_text", "qwen3_next", "nemotron_h"),
    "deepseek_v4",
    "kimi_linear",
    "qwen4_exp",
    "glm5_next",
)
TOY = '''
"""A family whose experts have Mixtral's names."""

from dataclasses import replace

from megagrpo.models.families.softmax_moe import Qwen3Moe
from megagrpo.models.kinds.experts.describe import MIXTRAL_NAMES


class Toy(Qwen3Moe):
    def experts(self, hf):
        return replace(super().experts(hf), names=MIXTRAL_NAMES)
'''
TRIES_THE_TOY = """
import json, shutil, sys
from pathlib import Path
from megagrpo.config.load import load_config
from megagrpo.tools.explain import explain

folder = Path(sys.argv[2])
(folder / "tiny").mkdir()
(folder / "tiny" / "config.json").write_text(json.dumps({**json.loads(sys.argv[3]), "model_type": "toy"}))
changes = [f"model.path={folder / 'tiny'}", "sft=null", "data.path=data.jsonl", "eval=null", "actor.parallel={}"]
config = load_config(sys.argv[1], changes)
text = explain(config)
loaded = "torch" in sys.modules

from megagrpo.actor.host import prepare_host
device = prepare_host()
import torch
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.tools.certify.synthetic import make_models
from megagrpo.config.schema import ActorConfig, OptimizerConfig, ParallelConfig
from megagrpo.models.folder import Model
from megagrpo.weights.hf_folder import HfFolder
from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.weights.hf_export import export_hf
from megagrpo.weights.actor_weights import load_initial_weights

path = str(folder / "tiny")
shutil.rmtree(path)
size = make_tiny_model(TinyModelConfig(path=path, family="toy"), seed=0)
small = make_models(folder / "certify", config, ParallelConfig(), 0)
settings = ActorConfig(optimizer=OptimizerConfig(distributed=False))
actor = MegatronActor(arch=Model.read(path).arch, config=settings, num_updates=1, seed=0, device=device)
weights = load_initial_weights(actor, path)
tokens = torch.arange(12)[None]
with torch.no_grad():
    hidden = actor.chunks[0](tokens, tokens, None)
    logits = hidden @ actor.chunks[0].output_weight().T
export_hf(folder / "exported", weights, actor.mesh, config, path)
written, source = HfFolder(folder / "exported"), HfFolder(path)
same = written.keys() == source.keys() and all(torch.equal(written[name], source[name]) for name in source)
print(json.dumps({
    "said": text, "torch_for_check": loaded, "size": size, "certified": small.family,
    "names": sorted(source), "finite": bool(logits.isfinite().all()), "spread": float(logits.std()), "same": same,
}))
"""


@pytest.mark.parametrize(("family", "tied"), DIGESTS)
def test_random_tensors_are_what_they_always_were(family, tied):
    assert {name for name, _ in DIGESTS} == FAMILIES.keys(), "every family has one"
    arch = architecture_of(hf_config(TinyModelConfig(path="x", family=family, tie_embeddings=tied)))
    digest = hashlib.sha256()
    for name, tensor in random_tensors(arch, torch.Generator().manual_seed(7)).items():
        for part in (name.encode(), str(tuple(tensor.shape)).encode(), tensor.numpy().tobytes()):
            digest.update(part)
    assert digest.hexdigest()[:16] == DIGESTS[family, tied]


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 5e6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1e6}}, 1e4),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 5e6}, "rope_scaling": LLAMA3}, 1e6),
        ({"rope_theta": 5e6, "rope_scaling": LLAMA3 | {"rope_theta": 1e6}}, 1e6),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6),
        ({"rope_theta": 1e6, "rope_parameters": None}, 1e6),
    ],
)
def test_the_base_of_rotary_embedding_is_the_one_that_engines_read(changes, theta):
    """Keys of transformers 4 and 5 in one file, as an edit leaves them; the numbers are transformers 5.12.1's."""
    hf = hf_config(TinyModelConfig(path="x", family="qwen3"))
    del hf["rope_theta"]
    assert architecture_of(hf | changes).attention.rotary.theta == theta


def without_theta(hf: dict) -> dict:
    parts = {key: without_theta(value) if isinstance(value, dict) else value for key, value in hf.items()}
    return {key: value for key, value in parts.items() if key != "rope_theta"}


def test_a_base_that_config_json_lacks_is_that_of_transformers_class():
    """Engines have it from there."""
    prepare_torchvision()
    from transformers import CONFIG_MAPPING

    found, expected = {}, {}
    for family in FAMILIES.keys() & CONFIG_MAPPING.keys():
        kind = CONFIG_MAPPING[family]
        expected[family] = getattr(kind.sub_configs.get("text_config", kind), "default_theta", 1e4)
        hf = without_theta(hf_config(TinyModelConfig(path="x", family=family)))
        found[family] = architecture_of(hf).attention.rotary.theta
    assert found == expected and len(set(found.values())) > 4


@pytest.mark.parametrize("family", FAMILIES)
def test_what_would_be_silently_wrong_is_refused_by_name(family, tmp_path):
    hf = hf_config(TinyModelConfig(path="x", family=family))
    assert model_problems(hf) == []
    wrong = {"hidden_act": "gelu", "mlp_bias": True, "use_sliding_window": True}
    wrong |= {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    wrong |= {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}}  # Qwen2.5-7B-Instruct-1M
    for key, value in wrong.items():
        problems = model_problems(hf | {key: value})
        assert len(problems) == 1 and key.replace("rope_scaling", "rope scaling") in problems[0]
    assert len(model_problems(hf | wrong)) == len(wrong)
    assert bool(model_problems(hf | {"attention_bias": True})) == (
        family not in ("qwen2", "glm4_moe", "qwen2_5_vl", "gpt_oss")
    )
    assert bool(model_problems(hf | {"partial_rotary_factor": 0.25})) == (
        family != "glm4_moe" and not family.startswith(("qwen3_5", "qwen3_next", "qwen4_exp"))
    )
    assert bool(model_problems(hf | {"rope_scaling": LLAMA3})) == (family in UNSCALED)
    epsilon = "layer_norm_epsilon" if family == "nemotron_h" else "rms_norm_eps"
    del hf[epsilon]
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ValueError, match=rf"config\.json: config\.json lacks {epsilon}"):
        assert Model.read(tmp_path).arch is None


def test_a_model_folder_is_read_once(tmp_path):
    """What was read is handed down: nobody looks at the file again."""
    hf = hf_config(TinyModelConfig(path="x", family="qwen3_moe"))
    (tmp_path / "config.json").write_text(json.dumps(hf))
    model = Model.read(tmp_path)
    (tmp_path / "config.json").unlink()
    assert model.arch == architecture_of(hf) and model.arch is model.arch
    assert model.tokenizer_folder == tmp_path and not model.sees_images
    with pytest.raises(ValueError, match=r"config\.json does not exist; a model is a"):
        Model.read(tmp_path)


def test_no_number_of_key_heads_is_that_of_query_heads():
    hf = hf_config(TinyModelConfig(path="x", family="qwen2"))
    assert architecture_of(hf | {"num_key_value_heads": None}).attention.kv_heads == (hf["num_attention_heads"])


def test_layers_without_experts_are_refused():
    hf = hf_config(TinyModelConfig(path="x", family="qwen3_moe"))
    for change in ({"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}):
        [problem] = model_problems(hf | change)
        assert problem.startswith(f"{next(iter(change))} ")
    del hf["num_experts"]
    assert model_problems(hf) == ["config.json lacks num_experts"]
    assert model_problems(hf | {"num_local_experts": 8}) == []
    more = model_problems(hf | {"num_local_experts": 8, "num_experts_per_tok": 9})
    assert more == ["num_experts_per_tok is more than its 8 experts"]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_5_moe", "qwen3_next", "glm4_moe"])
def test_one_expert_whose_weight_would_be_divided_by_itself_is_refused(family: str):
    """Megatron refuses a softmax over one score, and does not divide a sigmoid's."""
    hf = hf_config(TinyModelConfig(path="x", family=family)) | {"num_experts_per_tok": 1}
    assert "num_experts_per_tok 1 is not supported" in model_problems(hf)[0]
    if family == "qwen3_moe":
        assert model_problems(hf | {"norm_topk_prob": False}) == []


def test_division_by_the_chosen_experts_is_never_guessed():
    """Without the key transformers and SGLang differ on Qwen3-MoE; on Qwen3-VL-MoE both divide."""
    hf = hf_config(TinyModelConfig(path="x", family="qwen3_moe"))
    del hf["norm_topk_prob"]
    [problem] = model_problems(hf)
    assert problem.startswith("config.json lacks norm_topk_prob, which transformers reads as false and SGLang as true")
    assert not architecture_of(hf | {"norm_topk_prob": False}).experts.norm_topk
    seeing = hf_config(TinyModelConfig(path="x", family="qwen3_vl_moe"))
    assert not architecture_of(seeing | {"norm_topk_prob": False}).experts.norm_topk
    del seeing["norm_topk_prob"]
    assert architecture_of(seeing).experts.norm_topk


def test_a_new_family_is_one_file_and_two_rows(tmp_path):
    """In a copy of the package: `check`, the tiny model, the certificate's models, and the actor know it at once."""
    package = tmp_path / "megagrpo"
    shutil.copytree(ROOT / "megagrpo", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "models" / "families" / "toy.py").write_text(TOY)
    table = package / "models" / "table.py"
    text = table.read_text()
    rows = "FAMILIES: dict[str, Family] = {\n"
    assert text.count(rows) == 1
    imported = "from megagrpo.models.families.toy import Toy\n"
    text = text.replace(rows, f'{rows}    "toy": Toy(),\n').replace("import json\n", f"import json\n\n{imported}")
    table.write_text(text)
    with (package / "tools" / "certify" / "tiny.yaml").open("a") as file:
        file.write("toy:\n  like: [qwen3_moe]\n")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    described = hf_config(TinyModelConfig(family="qwen3_moe"))
    (tmp_path / "data.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    env = child_environment({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, [str(tmp_path)])
    printed = python("-c", TRIES_THE_TOY, QUICKSTART, tmp_path, json.dumps(described), cwd=tmp_path, env=env)
    found = json.loads(printed.splitlines()[-1])
    assert ": toy, " in found["said"] and not found["torch_for_check"], found["said"]
    assert found["finite"] and found["spread"] > 0.1 and found["same"] and found["certified"] == "toy"
    assert "model.layers.0.block_sparse_moe.experts.0.w2.weight" in found["names"] and found["size"] > 0


def test_check_and_the_ranks_say_the_same_of_a_layout(tmp_path):
    """One place has the rules: `check` lists them, who makes an actor refuses with them."""
    hf = hf_config(TinyModelConfig(path="x", family="qwen3_moe"))
    config = load_config(QUICKSTART, ["actor.world_size=9", "actor.parallel={tp: 3, ep: 3, pp: 3}"])
    arch = architecture_of(hf)
    problems = layout_problems(arch, config.actor)
    assert [text.split(" does not divide")[0] for text in problems] == [
        *["actor.parallel.tp = 3"] * 2,  # heads, key/value heads
        "actor.parallel.ep = 3",
        "actor.parallel.pp x vpp = 3",
    ]
    assert set(problems) <= set(check_against_model(config, hf))
    (tmp_path / "config.json").write_text(json.dumps(hf))
    model = config.model.model_copy(update={"path": str(tmp_path)})
    with pytest.raises(ValueError, match="the model does not fit the layout") as refused:
        model_to_train(config.model_copy(update={"model": model}))
    assert all(text in str(refused.value) for text in problems)


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_an_actor_without_transformer_engine_says_how_to_get_it():
    from megagrpo.actor.megatron_config import checked_kernels

    config = load_config(QUICKSTART, ["actor.transformer_engine=true"])
    arch = architecture_of(hf_config(TinyModelConfig(path="x", family="qwen3_moe")))
    with pytest.raises(ValueError, match="package transformer_engine is not installed here"):
        checked_kernels(arch, config.actor)


@pytest.mark.parametrize("heads, kv_heads, ranks", [(4, 1, 2), (4, 1, 4), (4, 2, 4), (8, 2, 8), (6, 3, 6), (8, 4, 4)])
@pytest.mark.parametrize("kind, hidden", [("weight", (5,)), ("bias", ())])
def test_ranks_that_share_a_head_hold_even_parts_of_megatrons_matrix(heads, kv_heads, ranks, kind, hidden):
    """Megatron cuts [q of its queries, k, v] of all groups into rows of equal number, inside heads too."""
    dim = 4
    attention = GroupedQuery(heads, kv_heads, dim, Rotary(1e4))
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
    hf = {f"{name}_proj.{kind}": torch.randn(number * dim, *hidden) for name, number in sizes.items()}
    whole = torch.empty((heads + 2 * kv_heads) * dim, *hidden)
    attention.load_qkv(whole, hf, kind, Shard(0, 1))
    parts = [torch.full_like(part, torch.nan) for part in whole.chunk(ranks)]
    for rank, part in enumerate(parts):
        attention.load_qkv(part, hf, kind, Shard(rank, ranks))
    assert torch.equal(torch.cat(parts), whole)
