"""Qwen3.8-Flash-Next: its sizes as published, the table of n-grams that stays in its file, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

from examples.laptop.recipe import TinyModelConfig
from megagrpo.actor.host import prepare_host
from megagrpo.check.problems import check_against_model, layout_problems
from megagrpo.config.schema import ActorConfig
from megagrpo.models.folder import Model
from megagrpo.models.table import (
    FAMILIES,
    architecture_of,
    attention_length,
    is_left_out,
    left_out,
    model_problems,
    model_tensors,
    parameter_counts,
)
from megagrpo.tools.certify.tiny_model import hf_config, random_tensors
from megagrpo.tools.plan.trainer_memory import layer_cost, stage_parameters
from megagrpo.tools.plan.work import model_work
from megagrpo.weights.hf_export import untrained_tensors
from tests.experiments import ROOT, experiment
from tests.made_tensors import Made

prepare_host("cpu")

from megagrpo.models.kinds.ngrams.layer import NGramRows  # noqa: E402  Megatron needs a prepared host

FLASH = json.loads((ROOT / "configs/models/Qwen3.8-Flash-Next/config.json").read_text())
ON_GPUS = {"dtype": "bfloat16", "load_format": "model", "sglang": {"ple_offload_embedding": True}}


def changed(**text: object) -> dict:
    return FLASH | {"text_config": FLASH["text_config"] | text}


def test_a_description_without_its_keys_is_refused_and_has_no_parts_left_out():
    for key in ("ple_layer_ids", "num_hidden_layers"):
        text = {name: value for name, value in FLASH["text_config"].items() if name != key}
        lacking = FLASH | {"text_config": text | {"num_nextn_predict_layers": 1}}
        assert f"config.json lacks {key}" in model_problems(lacking) and left_out(lacking) == []


def test_published_sizes():
    """125.7B, and 51.2B in the table; a token meets 6.7B, the output layer among them."""
    arch = architecture_of(FLASH)
    counts = parameter_counts(arch)
    table = 320_001_536 * 160
    assert (round((counts.total - table) / 1e8), round(table / 1e8), round(counts.active / 1e8)) == (1257, 512, 67)
    [stage] = stage_parameters(arch, ActorConfig.model_validate({"dtype": "bfloat16"}))
    assert (stage.dense, stage.expert) == (counts.dense - table, counts.expert), "no trainer holds the table"
    assert any("51.2 B numbers of n-grams" in text for text in left_out(FLASH))
    assert arch.num_streams == 4 and arch.attention_layers == 12 and arch.recurrent.sigmoid_gate


def test_hashes_are_the_published_ones():
    """As the published file has them in layer_multipliers and ngram_heads_vocab_sizes."""
    ngrams = architecture_of(FLASH).ngrams
    assert ngrams.multipliers(1) == [23703573157769, 20109073645365, 8052911324071]
    assert ngrams.sizes(1)[0] == 20000003 and ngrams.sizes(1)[-1] == 20000171 and len(ngrams.sizes(1)) == 16
    assert {spec.shape for spec in ngrams.table(1)} == {(2500012, 160)} and len(list(ngrams.table(1))) == 128


def test_names_are_the_files():
    specs = {spec.name: spec for spec in model_tensors(architecture_of(FLASH))}
    layer = "model.language_model.layers."
    assert "model.language_model.norm.weight" not in specs and f"{layer}0.input_layernorm.weight" not in specs
    assert specs["model.language_model.hyper_connection_mixer.input_mix_weight_up.weight"].shape == (10240, 320)
    assert specs[f"{layer}47.mlp_hyper_connection.block_inject_weight.weight"].shape == (4, 10240)
    assert specs[f"{layer}1.ple.conv1d.weight"].shape == (10240, 1, 4)
    assert specs[f"{layer}3.self_attn.indexer.index_qk_proj.weight"].shape == (5 * 128, 2560)
    frozen = {name for name, spec in specs.items() if not spec.trained}
    assert all(".indexer." in name or ".ngram_embedding.shard_" in name for name in frozen) and len(frozen) == 36 + 128


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hc_count": 1}, "hc_count must be at least 2"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads must be 1"),
        ({"indexer_compress_ratio": 3}, "indexer_compress_ratio must be at least 2, and divide"),
        ({"indexer_head_dim": 32}, "indexer_head_dim must be at least the 64 numbers"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids must be numbers from 1 to 48"),
        ({"ple_embed_dim": 2561}, "ple_embed_dim 2561 must be a multiple of the 16 rows"),
        ({"eos_token_id": [1, 2]}, "eos_token_id must name one token"),
        ({"output_gate_type": "tanh"}, "output_gate_type 'tanh'"),
        ({"norm_topk_prob": False}, "norm_topk_prob False"),
        ({"layer_types": ["full_attention"] * 48}, "layer_types is not full attention in every 4-th"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fused experts in FP8"),
    ],
)
def test_what_would_be_wrong_is_refused(changes: dict, named: str):
    assert any(named in problem for problem in model_problems(changed(**changes)))


@pytest.mark.parametrize("key", [*FAMILIES["qwen4_exp"].REQUIRED_KEYS])
def test_a_size_that_is_missing_is_named(key: str):
    text = {name: value for name, value in FLASH["text_config"].items() if name != key}
    assert f"config.json lacks {key}" in model_problems(FLASH | {"text_config": text})


def test_engines_that_would_have_no_table_are_refused():
    """Publishes leave it out, so a start must read it, and where engines' sleep does not end it."""
    on_cpu = check_against_model(experiment(), FLASH)
    assert any("need GPUs: SGLang's sparse attention" in text for text in on_cpu)
    for rollout, refused in (
        (ON_GPUS, False),
        (ON_GPUS | {"load_format": "dummy"}, True),
        (ON_GPUS | {"sglang": {}}, True),
    ):
        found = check_against_model(experiment(actor={"dtype": "bfloat16"}, rollout=rollout), FLASH)
        assert any("table of n-grams" in text for text in found) == refused
        assert not any("need GPUs" in text for text in found)


def test_settings_that_its_layers_do_not_know_are_refused():
    arch = architecture_of(FLASH)
    for settings, named in (
        ({"lora": {"rank": 4}}, "actor.lora is not supported"),
        ({"world_size": 32, "parallel": {"tp": 4, "cp": 8}}, "tp x cp = 32 does not divide"),
    ):
        assert any(named in problem for problem in layout_problems(arch, ActorConfig.model_validate(settings)))
    [problem] = model_problems(changed(num_nextn_predict_layers=1), draft=True)
    assert problem.startswith("actor.draft is not supported with a qwen4_exp model")


def test_what_is_computed_and_kept():
    """A query sees 512 blocks of 4 keys and 3 more; engines keep a key of 128 numbers for each block."""
    arch = architecture_of(FLASH)
    assert arch.attention.most_keys == 2048 + 3
    assert model_work(arch).cache_bytes(1) == 12 * (2 * 2 * 256 + 128 // 4) * 2
    actor = ActorConfig.model_validate({"world_size": 2, "dtype": "bfloat16", "parallel": {"tp": 2}})
    sparse = layer_cost(arch, actor, 8192, 3, 1.0)
    # torch computes with every key, under a mask
    assert sparse.pair_flops == 4 * 12 * 256 + 2 * 4 * 128 / 4 and sparse.chosen_flops == 0
    # of both ranks; half of the keys are before a query
    pair = 12 * (4 * 24 * 256 + 2 * 4 * 128 / 4) / 2
    assert attention_length(arch) == pytest.approx(2 * parameter_counts(arch).active / pair, rel=0.1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random model whose file has the hashes of its table, too."""
    hf = hf_config(TinyModelConfig(path="x", family="qwen4_exp"))
    arch = architecture_of(hf)
    stored = random_tensors(arch, torch.Generator().manual_seed(0))
    prefix = "model.language_model."
    for name, numbers in arch.ngrams.hashing(1).items():
        stored[name.replace("model.", prefix, 1)] = torch.tensor(numbers)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    save_file(stored, tmp_path / "model.safetensors")
    return tmp_path


def test_an_export_has_the_table_and_its_hashes_as_they_are(folder: Path):
    model = Model.read(folder)
    model.refuse_weights()
    [kept] = untrained_tensors(folder)
    stored = load_file(folder / "model.safetensors")
    assert len(kept) == 6 and all(torch.equal(stored[name], tensor) for name, tensor in kept.items())
    hashes = [name for name in kept if ".shard_" not in name]
    assert len(hashes) == 3 and all(is_left_out(model.arch, name) for name in hashes)


def test_a_table_of_another_size_is_refused(folder: Path):
    stored = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_2.weight"
    save_file(stored | {name: stored[name][1:].clone()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="shard_2.weight has the shape"):
        Model.read(folder).refuse_weights()


@pytest.mark.parametrize(
    ("part", "numbers"),
    [("layer_multipliers", [1, 3, 5]), ("ngram_heads_vocab_sizes", [7] * 16), ("ngram_embedding.weight_scale", [0.5])],
)
def test_numbers_that_trainers_do_not_compute_with_are_refused(part: str, numbers: list):
    """Engines would take these from the files."""
    ngrams = architecture_of(FLASH).ngrams
    rows = SimpleNamespace(_own=ngrams, _index=1)
    files = {spec.name: torch.empty(0) for spec in ngrams.table(1)}
    files |= {name: torch.tensor(right) for name, right in ngrams.hashing(1).items()}
    NGramRows.map_table(rows, files)
    name = f"model.layers.1.ple.ple_embedding.{part}"
    with pytest.raises(ValueError, match=f"{name}: .* in the files, but trainers compute with"):
        NGramRows.map_table(rows, files | {name: torch.tensor(numbers)})


def test_rows_are_read_part_by_part():
    """Of a table in many parts, without a mask of all tokens for each."""
    table = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    numbers = torch.randint(1000, (40, 2), generator=torch.Generator().manual_seed(1))
    rows = SimpleNamespace(_table=table.split(2), _config=SimpleNamespace(params_dtype=torch.float32))
    with Made() as made:
        found = NGramRows._rows(rows, numbers)
    assert torch.equal(found, table[numbers].flatten(1))
    assert not any(t.dtype == torch.bool for t in tree_leaves(made.results) if isinstance(t, torch.Tensor))
