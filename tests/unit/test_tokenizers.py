"""Which tokenizers are taken: of the model's size, of data and not of code, whatever their class is called."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.laptop.model import character_tokenizer, make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.data.prompts import load_tokenizer
from megagrpo.data.texts import decoder
from megagrpo.models.folder import Model

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
    with pytest.raises(ValueError, match="config.json does not exist; model.path must be"):
        Model.read("somebody/on-the-hub")
    with pytest.raises(ValueError, match="on-the-hub: no such folder"):
        load_tokenizer(Model.read(small.path, "somebody/on-the-hub"))
    (Path(large.path) / "config.json").write_text("{oops")
    with pytest.raises(ValueError, match="config.json: not a model description"):
        Model.read(large.path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no tokenizer.json, vocab.json"):
        load_tokenizer(Model.read(small.path, tmp_path / "empty"))


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
