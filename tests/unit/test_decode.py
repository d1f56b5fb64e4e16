"""Texts of responses are joined from the bytes of their tokens, as the tokenizer decodes them."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megagrpo.config.rollout import SamplingConfig
from megagrpo.data.texts import decoder
from megagrpo.models.folder import Model


@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_texts_of_bytes_are_those_of_the_tokenizer(skip_special_tokens, tmp_path, monkeypatch):
    """Halves of characters and special tokens included, and ids in a gap or behind the last token, which
    are none; joined, not decoded by the tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<bos>", "<eos>", *alphabet, "Ġthe", "ä½łå¥½", "ðŁĺ", "ab"]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)} | {"Ġfar": 290}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<bos>", "<eos>", "<call> é"])
    backend.add_tokens(["<think>"])
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 300}))
    decode = decoder(tokenizer, Model.read(str(tmp_path)), SamplingConfig(skip_special_tokens=skip_special_tokens))
    chance = np.random.default_rng(0)
    drawn = [chance.integers(3, 300, chance.integers(0, 40)) for _ in range(200)]
    drawn.append(chance.integers(3, 300, 10_000))  # joined in blocks
    assert max(tokenizer.get_vocab().values()) == 290 > len(tokenizer)
    wanted = [tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) for ids in drawn]
    monkeypatch.setattr(PreTrainedTokenizerFast, "_decode", None)  # it must not be asked
    for ids, text in zip(drawn, wanted, strict=True):
        with_own = np.concatenate([[1], ids, [0, 2]]).astype(np.int32)
        assert decode(with_own) == text == decode(ids.astype(np.int32))


@pytest.mark.parametrize("sampling", [{"stop": ["<|im_end|>"]}, {"stop_token_ids": [4]}, {}])
def test_a_special_token_that_ended_the_response_is_no_text(tmp_path, sampling):
    """Also one that the experiment names, as `check` advises for base models: graders compare whole texts."""
    backend = Tokenizer(models.BPE({"<pad>": 0, "5": 1, ">": 2}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 300}))
    sampling = {key: [*value, ">"] if key == "stop" else [*value, 2] for key, value in sampling.items()}
    decode = decoder(tokenizer, Model.read(str(tmp_path)), SamplingConfig(**sampling))
    assert decode(np.array([1, 4])) == ("5" if sampling else "5<|im_end|>")
    assert (
        decode(np.array([1, 4, 1])) == "5<|im_end|>5"
        and decode(np.array([1, 2])) == "5>"
        and decode(np.array([1, 3])) == "5"
    )


def test_an_id_of_no_token_is_no_text(tmp_path):
    """Also of a tokenizer that decodes by itself."""
    words = ["<pad>", "▁a", "▁b"]
    backend = Tokenizer(models.BPE({word: 2 * i for i, word in enumerate(words)}, []))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    decode = decoder(tokenizer, Model.read(str(tmp_path)))
    assert decode(np.array([2, 1, 3, 299, 4])) == "a b"
