"""Which tokenizers are taken: of the model's size, of data and not of code, whatever their class is called."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from examples.laptop.model import character_tokenizer, make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.config.data import DataConfig
from megagrpo.data.messages import tokens_behind
from megagrpo.data.prompts import load_tokenizer, render_rows, whole_response
from megagrpo.data.rows import Row
from megagrpo.data.texts import decoder
from megagrpo.models.folder import Model
from megagrpo.rollout.agents.renderer import Renderer
from megagrpo.tools.check.turn_ends import end_advice
from tests.experiments import experiment

ALPHABET = "0123456789+-*/=.()<># abcdefghijklmnopqrstuvwxyz"


def test_the_tokenizer_must_fit_the_model(tmp_path):
    small = TinyModelConfig(path=str(tmp_path / "small"), alphabet="01")
    large = TinyModelConfig(path=str(tmp_path / "large"), alphabet="".join(map(chr, range(33, 93))))
    make_tiny_model(small, seed=0)
    make_tiny_model(large, seed=0)
    assert len(load_tokenizer(Model.read(small.path))) == 6
    assert len(load_tokenizer(Model.read(large.path, small.path))) == 6
    with pytest.raises(ValueError, match=r"token id 63 but model .*small only 32 embeddings"):
        load_tokenizer(Model.read(small.path, large.path))
    with pytest.raises(ValueError, match="config.json does not exist; a model is a"):
        Model.read("somebody/on-the-hub")
    with pytest.raises(ValueError, match="on-the-hub: no such folder"):
        load_tokenizer(Model.read(small.path, "somebody/on-the-hub"))
    (Path(large.path) / "config.json").write_text("{oops")
    with pytest.raises(ValueError, match="config.json: not a model description"):
        Model.read(large.path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no tokenizer.json, vocab.json"):
        load_tokenizer(Model.read(small.path, tmp_path / "empty"))


def sentencepiece(kind: str) -> PreTrainedTokenizerFast:
    """One token a character, which writes a space as Llama 2, Mistral and others do."""
    words = ["<unk>", "<s>", "</s>", "\u2581", "\n", *"abcdefghijklmnopqrstuvwxyzT[]/"]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    if kind == "normalizer":
        space = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        backend.normalizer = normalizers.Sequence(space)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=kind, split=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", ["first", "always", "never", "normalizer"])
def test_a_text_behind_another_begins_as_in_both(kind):
    tokenizer = sentencepiece(kind)
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    for known, text in ("[inst]hi[/inst]", "The"), ("</s>", "[inst]"), ("a\n", "The"), ("a", " The"), ("", "The"):
        assert encode(known) + tokens_behind(tokenizer, known, text) == encode(known + text), (known, text)
    row = Row(0, "rows.jsonl:1", "hi", "a", "", None, {}, 0, demonstration="The")
    [prompt] = render_rows(DataConfig(path="d", prompt_template="[inst]{prompt}[/inst]"), tokenizer, [row])
    assert prompt.demonstration.tolist() == [*tokenizer.convert_tokens_to_ids(list("The")), tokenizer.eos_token_id]
    said = Renderer(tokenizer, DataConfig(path="d"), True).after_turn("higher", np.array([5]))
    assert said.tolist() == tokenizer.convert_tokens_to_ids(list("higher"))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>"
        "{% else %}[inst]{{ m.content }}[/inst]{% endif %}{% endfor %}"
    )
    renderer = Renderer(tokenizer, DataConfig(path="d", chat_template=True), True)
    whole = encode("[inst]hi[/inst]ok</s>[inst]more[/inst]")
    end = tokenizer.eos_token_id
    after = renderer.after_turn("more", np.array([*encode("ok"), end]))
    assert after.tolist() == whole[whole.index(end) + 1 :]


@pytest.mark.parametrize(
    ("end", "sampling", "advice"),
    [
        ("<eos>\n", {}, ""),
        (" <eos>", {}, ""),
        ("<|im_end|>\n", {}, r"answer with '<\|im_end\|>\\n', and .* at <eos>: .* name that text in sampling.stop"),
        ("<|im_end|>\n", {"stop_token_ids": [52]}, ""),
        ("<|im_end|>\n", {"stop": ["<|im_end|>"]}, ""),
        ("\n", {}, r"name that text in sampling.stop, or take another model.tokenizer"),
    ],
)
def test_a_turn_that_does_not_end_as_a_response_is_advice(tmp_path, end, sampling, advice):
    make_tiny_model(TinyModelConfig(path=str(tmp_path), alphabet=ALPHABET), seed=0)
    tokenizer = load_tokenizer(Model.read(tmp_path))
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = (
        f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{end}{{% endfor %}}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = experiment(data={"path": "d", "chat_template": True}, sampling=sampling)
    said = list(end_advice(config, tokenizer, Model.read(tmp_path)))
    assert len(said) == bool(advice) and all(re.search(advice, text) for text in said), said


@pytest.mark.parametrize(
    ("own", "data", "written", "advice"),
    [
        (True, {"chat_template": True}, "<bos>", ""),
        (True, {"chat_template": True}, "", "begins texts with <bos>, .*: write it into the chat template"),
        (True, {}, "", "begins texts with <bos>, .*: data.add_bos: true or data.prompt_template"),
        (True, {"add_bos": True}, "", ""),
        (False, {"chat_template": True}, "", ""),
        (False, {}, "", ""),
    ],
)
def test_prompts_without_the_token_that_the_tokenizer_begins_with_are_advice(tmp_path, own, data, written, advice):
    make_tiny_model(TinyModelConfig(path=str(tmp_path), alphabet=ALPHABET), seed=0)
    tokenizer = load_tokenizer(Model.read(tmp_path))
    if own:
        bos = tokenizer.bos_token_id
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            "<bos> $A", special_tokens=[("<bos>", bos)]
        )
    tokenizer.chat_template = (
        f"{written}{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{{% if m.role == 'assistant' %}}<eos>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = experiment(data={"path": "d"} | data)
    said = list(end_advice(config, tokenizer, Model.read(tmp_path)))
    assert len(said) == bool(advice) and all(re.search(advice, text) for text in said), said


@pytest.mark.parametrize(
    ("user", "answer", "said"),
    [("<user>", "<assistant>", ["begins an answer with '<assistant>', but writes no"]), ("", "", []), ("<a>", " ", [])],
)
def test_a_template_without_a_generation_prompt_is_advice(tmp_path, user, answer, said):
    """Where an answer follows at once, as Mistral's, there is none to write."""
    make_tiny_model(TinyModelConfig(path=str(tmp_path), alphabet=ALPHABET), seed=0)
    tokenizer = load_tokenizer(Model.read(tmp_path))
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{{% if m.role == 'user' %}}{user}{{{{ m.content }}}}"
        f"{{% else %}}{answer}{{{{ m.content }}}}<eos>{{% endif %}}{{% endfor %}}"
    )
    config = experiment(data={"path": "d", "chat_template": True})
    found = list(end_advice(config, tokenizer, Model.read(tmp_path)))
    assert len(found) == len(said) and all(words in text for words, text in zip(said, found, strict=True)), found


def test_a_teacher_that_ends_texts_otherwise_is_advice(tmp_path):
    policy, teacher = tmp_path / "policy", tmp_path / "teacher"
    for folder in policy, teacher:
        make_tiny_model(TinyModelConfig(path=str(folder), alphabet=ALPHABET), seed=0)
    config = experiment(algorithm={"distillation": {}}, teachers={"big": {"path": str(teacher)}})
    model = Model.read(policy)
    assert list(end_advice(config, load_tokenizer(model), model)) == []
    (teacher / "generation_config.json").write_text('{"eos_token_id": [5]}')
    described = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(described | {"eos_token_id": 5}))
    [said] = end_advice(config, load_tokenizer(model), model)
    assert said.startswith("teachers.big ends a text with token 5, and the policy's responses end at <eos>")


def test_a_tokenizer_of_python_code_is_refused(tmp_path):
    """As Moonlight's folder has it: for its model_type transformers builds another tokenizer without a word."""
    code = {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_moonshot.X", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(code))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "vocab_size": 600}))
    ranks = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    (tmp_path / "tiktoken.model").write_text("".join(ranks))
    with pytest.raises(ValueError, match=r"is Python code .* convert it once .* as model\.tokenizer"):
        load_tokenizer(Model.read(str(tmp_path)))
    character_tokenizer(ALPHABET).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(code | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert load_tokenizer(Model.read(str(tmp_path))).decode([4]) == ALPHABET[0]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_tokenizer_of_bytes_keeps_its_parts_whatever_its_class_is_called(model_type, tmp_path):
    """As DeepSeek-R1-Distill has it."""
    stored = Tokenizer(models.BPE(ignore_merges=True))
    stored.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    stored.decoder = decoders.ByteLevel()
    bytes_of_bpe = pre_tokenizers.ByteLevel.alphabet()
    special = ["<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=bytes_of_bpe, special_tokens=special)
    stored.train_from_iterator(["What is the answer of 12 + 34 ?"] * 9, trainer)
    stored.save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 300}))
    text = "What is the answer?\n 'a'  b = 你"
    model = Model.read(str(tmp_path))
    loaded = load_tokenizer(model)
    token_ids = loaded.encode(text, add_special_tokens=False)
    assert token_ids == stored.encode(text).ids and decoder(loaded, model)(np.array(token_ids)) == text


@pytest.mark.parametrize(
    ("prompt", "response", "learned"),
    [
        ("2+2<think>\n", "<think>\n4</think>4", "4</think>4"),
        ("2+2<think>\n", "<think>4</think>4", "4</think>4"),
        ("2+2<think>", "4</think>4", "4</think>4"),
        ("2+2<think>\n\n</think>\n\n", "4", "4"),
        ("<think> is a tag", "<think>4</think>4", "<think>4</think>4"),
        ("2+2<think>\n", "4", None),
    ],
)
def test_a_response_to_learn_follows_a_reasoning_that_the_prompt_begins(prompt, response, learned):
    tokenizer = character_tokenizer(f"{ALPHABET}\n")
    if learned is None:
        with pytest.raises(ValueError, match="a:1: the chat template begins a reasoning, which the response '4'"):
            whole_response(tokenizer, "a:1", prompt, response)
        return
    *ids, end = whole_response(tokenizer, "a:1", prompt, response)
    assert tokenizer.decode(ids) == learned and end == tokenizer.eos_token_id
