"""Tiny models load in transformers without a missing or spare tensor; tiny tasks are right, disjoint, repeatable."""

import json
import random
import re
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megagrpo.rollout.cpu.sitecustomize  # noqa: F401  transformers' models load torchvision, see there
from megagrpo.config.schema import DatasetConfig, TinyModelConfig
from megagrpo.tiny.arithmetic import calculator, exact_value
from megagrpo.tiny.datasets import make_dataset
from megagrpo.tiny.model import character_tokenizer, make_tiny_model

GSM8K = Path(__file__).parents[1] / "golden" / "gsm8k"
SMALL = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
    "ffn_size": 96,
    "num_experts": 4,
    "expert_ffn_size": 48,
}


def load_in_transformers(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        *product(("qwen2", "qwen3", "qwen3_moe", "llama"), (False, True)),
        *product(("mixtral", "glm4_moe", "deepseek_v3"), (False,)),
    ],
)
def test_a_tiny_model_is_a_checkpoint_of_its_family(tmp_path, family, tied):
    config = TinyModelConfig(path=str(tmp_path / "model"), family=family, tie_embeddings=tied, **SMALL)
    size = make_tiny_model(config, seed=1)
    model, tokenizer = load_in_transformers(config.path)
    assert model.config.model_type == family and model.dtype == torch.float32
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert sum(t.numel() for t in [*model.parameters(), *biases]) == size
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id == 2
    assert len(tokenizer) <= model.config.vocab_size and model.config.vocab_size % 32 == 0
    ids = tokenizer("12+3=", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.shape == (1, 5, model.config.vocab_size) and logits.isfinite().all()
    assert 0.1 < logits.std() < 10  # neither dead nor exploding


def test_the_seed_decides_the_weights(tmp_path):
    folders = []
    for i, seed in enumerate((5, 5, 6)):
        config = TinyModelConfig(path=str(tmp_path / str(i)), **SMALL)
        make_tiny_model(config, seed=seed)
        folders.append((Path(config.path) / "model.safetensors").read_bytes())
    assert folders[0] == folders[1] != folders[2]


@given(st.text("0123456789+-*/=.()<># ", max_size=40))
def test_the_tokenizer_gives_back_every_text(text):
    tokenizer = character_tokenizer("0123456789+-*/=.()<># ")
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text


def test_the_tokenizer_marks_what_it_does_not_know():
    tokenizer = character_tokenizer("ab\n")
    assert tokenizer.encode("a\nbz") == [4, 6, 5, tokenizer.unk_token_id]
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 2]
    assert tokenizer.decode([4, 5, 2], skip_special_tokens=True) == "ab"


@pytest.mark.parametrize(
    "change, said",
    [
        ({"alphabet": "0120"}, "alphabet '0120': repeats 0"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"family": "llama", "head_dim": 32}, "needs num_heads x head_dim = hidden_size"),
        ({"experts_per_token": 5}, "experts_per_token 5 is more than num_experts 4"),
    ],
)
def test_impossible_sizes_write_nothing(tmp_path, change, said):
    config = TinyModelConfig(path=str(tmp_path / "model"), **(SMALL | change))
    with pytest.raises(ValueError, match=said):
        make_tiny_model(config, seed=0)
    assert not Path(config.path).exists()


def read(folder):
    return {
        p.stem: [json.loads(line) for line in p.read_text().splitlines()] for p in sorted(Path(folder).glob("*.jsonl"))
    }


def check_files(files, sizes):
    assert {name: len(rows) for name, rows in files.items()} == sizes
    prompts = [row["prompt"] for rows in files.values() for row in rows]
    assert len(set(prompts)) == len(prompts)
    for rows in files.values():
        for row in rows:
            # Decimal points make Python's floats; both sides are compared as exact as floats allow.
            assert abs(eval(row["prompt"].rstrip("=")) - float(row["answer"])) < 1e-9


def test_arithmetic(tmp_path):
    config = DatasetConfig(kind="arithmetic", folder=str(tmp_path / "a"), num_sft=300, num_train=200, num_eval=100)
    counts = make_dataset(config, seed=0)
    files = read(config.folder)
    check_files(files, {"eval": 100, "sft": 300, "train": 200})
    assert counts == {"different problems": 21_300, "eval.jsonl": 100, "sft.jsonl": 300, "train.jsonl": 200}
    operators = {re.search(r"(?<=\d)[-+*]", row["prompt"]).group() for row in files["eval"]}
    assert operators == set("+-*")
    again = config.model_copy(update={"folder": str(tmp_path / "b")})
    make_dataset(again, seed=0)
    assert read(again.folder) == files
    make_dataset(again, seed=1)
    assert read(again.folder) != files
    with pytest.raises(ValueError, match=r"600 problems wanted, but operands up to 9 \(max_operand\) give only 300"):
        make_dataset(config.model_copy(update={"max_operand": 9}), seed=0)


def test_arithmetic_uses_every_problem_once(tmp_path):
    config = DatasetConfig(
        kind="arithmetic", folder=str(tmp_path), num_sft=100, num_train=100, num_eval=100, max_operand=9
    )
    make_dataset(config, seed=0)
    check_files(read(config.folder), {"eval": 100, "sft": 100, "train": 100})


def test_arithmetic_with_a_calculator(tmp_path):
    """The warm-up shows the call, with what the tool will say; problems and right answers stay as they are."""
    config = DatasetConfig(
        kind="arithmetic", folder=str(tmp_path / "a"), num_sft=50, num_train=20, num_eval=10, max_operand=999
    )
    make_dataset(config, seed=0)
    make_dataset(config.model_copy(update={"folder": str(tmp_path / "b"), "calculator": True}), seed=0)
    plain, called = read(tmp_path / "a"), read(tmp_path / "b")
    assert called["train"] == plain["train"] and called["eval"] == plain["eval"]
    for before, after in zip(plain["sft"], called["sft"], strict=True):
        call, said, repeated = re.fullmatch(r"(<[^<>]*>)(-?\d+)=(-?\d+)", after["answer"]).groups()
        assert call == f"<{before['prompt'][:-1]}>" and calculator(call) == said == repeated == before["answer"]
    with pytest.raises(ValueError, match="calculator belongs to kind arithmetic"):
        DatasetConfig(kind="gsm8k_calc", folder="f", calculator=True)


def gsm8k_line(*annotations):
    return json.dumps({"question": "?", "answer": " ".join(f"so <<{a}>> it is" for a in annotations) + "\n#### 1"})


def test_gsm8k_calc_keeps_exact_expressions_and_counts_the_rest(tmp_path):
    source = tmp_path / "gsm8k"
    source.mkdir()
    train = [
        gsm8k_line("48/2=24", "48+24=72"),
        gsm8k_line("0.2*50=10", "48 / 2 = 24"),
        gsm8k_line("1/3=.33", "5=5", "1+1+1+1+1+1+1+1+1=9"),
    ]
    test = [gsm8k_line("48/2=24", "9-12=-3", "10*(2+3)=50", "1/8=0.125", "20%*5=1")]
    (source / "train.jsonl").write_text("\n".join(train))
    (source / "test.jsonl").write_text("\n".join(test))
    config = DatasetConfig(
        kind="gsm8k_calc", folder=str(tmp_path / "out"), source=str(source), num_sft=5, num_train=3, num_eval=3
    )
    counts = make_dataset(config, seed=0)
    files = read(config.folder)
    check_files(files, {"eval": 3, "sft": 5, "train": 3})
    assert {r["prompt"]: r["answer"] for r in files["eval"]} == {"9-12=": "-3", "10*(2+3)=": "50", "1/8=": "0.125"}
    assert {r["prompt"] for r in files["train"]} == {"48/2=", "48+24=", "0.2*50="}
    numbers = {number for r in files["sft"] for number in re.findall(r"[\d.]+", r["prompt"])}
    assert numbers <= {"48", "2", "24", "0.2", "50"}
    assert counts["of these also in train"] == 1
    assert counts["annotations dropped, unreadable or not exact"] == 2
    assert counts["annotations dropped, nothing to compute"] == 1
    assert counts["annotations dropped, too long"] == 1
    sums = config.model_copy(update={"operators": "+-", "num_sft": 2, "num_train": 1, "num_eval": 1})
    assert make_dataset(sums, seed=0)["annotations dropped, other operators"] == 6
    assert {r["prompt"] for name in ("train", "eval") for r in read(sums.folder)[name]} == {"48+24=", "9-12="}
    with pytest.raises(ValueError, match=r"num_train 7 and num_eval 3 wanted, but .* has 3 and 3"):
        make_dataset(config.model_copy(update={"num_train": 7}), seed=0)
    with pytest.raises(ValueError, match="num_sft 1000: the source's numbers give only"):
        make_dataset(config.model_copy(update={"num_sft": 1000}), seed=0)
    (source / "test.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"test\.jsonl:1: not a GSM8K line"):
        make_dataset(config, seed=0)
    with pytest.raises(ValueError, match=r"train\.jsonl: no such file"):
        make_dataset(config.model_copy(update={"source": str(tmp_path)}), seed=0)


def test_gsm8k_calc_on_the_real_data(tmp_path):
    config = DatasetConfig(
        kind="gsm8k_calc", folder=str(tmp_path), source=str(GSM8K), num_sft=600, num_train=300, num_eval=240
    )
    counts = make_dataset(config, seed=0)
    check_files(read(config.folder), {"eval": 240, "sft": 600, "train": 300})
    assert counts["different expressions in train"] == 311


@pytest.mark.parametrize(
    "text, value",
    [
        ("48/2", "24"),
        ("0.2*50", "10"),
        (".5*.1", "0.05"),
        ("-(3-5)*2", "4"),
        ("7/8", "0.875"),
        ("1-1.25", "-0.25"),
        ("3", "3"),
    ]
    + [(bad, None) for bad in ("1/3", "5%", "10/0", "2**3", "007+1", "a+1", "1+", "", "f(2)", "1_0+True")],
)
def test_exact_value(text, value):
    assert exact_value(text) == value


def test_exact_value_of_random_decimals():
    numbers = random.Random(0)
    for _ in range(500):
        a, b = (f"{numbers.randint(0, 999)}.{numbers.randint(0, 99):02d}" for _ in range(2))
        assert Fraction(exact_value(f"{a}-{b}")) == Fraction(a) - Fraction(b)
