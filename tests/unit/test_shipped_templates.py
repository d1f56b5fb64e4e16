"""Prompts and turns as transformers writes them, on every chat template that installed packages ship."""

import ast
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from examples.laptop.model import character_tokenizer
from megagrpo.config.data import DataConfig
from megagrpo.rollout.agents.renderer import Renderer

PLACES = {
    "transformers": "models/*/processing_*.py",
    "megatron": "core/tokenizers/**/*.py",
    "sglang": "srt/tokenizer/*.py",
}
CALL = {"id": "123456789", "type": "function", "function": {"name": "look_up", "arguments": {"word": "a b"}}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
ASKED = {"role": "user", "content": " What is {1 + 1}?\n"}
ANSWERED = {"role": "assistant", "content": "Two, <b>surely</b>"}
TALKS = {
    "question": [ASKED],
    "system": [{"role": "system", "content": "Be short."}, ASKED],
    "turns": [ASKED, ANSWERED, {"role": "user", "content": "And 2 + 2?"}],
    "call": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}],
}


def shipped() -> dict[str, str]:
    """Template -> its file."""
    found = {}
    for package, pattern in PLACES.items():
        for root in find_spec(package).submodule_search_locations:
            for path in sorted(Path(root).glob(pattern)):
                text = path.read_text(encoding="utf-8")
                if "add_generation_prompt" in text and "{%" in text:
                    for node in ast.walk(ast.parse(text)):
                        if isinstance(node, ast.Constant) and "{%" in str(node.value) and "messages" in node.value:
                            found[node.value] = path.name
    return found


TEMPLATES = shipped()
ALPHABET = "".join(map(chr, [10, *range(32, 127)])) + "".join({c for t in TEMPLATES for c in t if ord(c) > 126})


def tokenizer_of(template: str, end: str = "<|im_end|>"):
    made = character_tokenizer(ALPHABET)
    made.add_special_tokens({"eos_token": end, "bos_token": "<s>"})
    made.chat_template = template
    return made


def test_the_packages_ship_templates():
    assert len(TEMPLATES) > 7


@pytest.mark.parametrize("name", TALKS)
def test_a_prompt_is_what_transformers_makes_of_it(name):
    read = 0
    for template, file in TEMPLATES.items():
        tokenizer = tokenizer_of(template)
        renderer = Renderer(tokenizer, DataConfig(path="a", chat_template=True, max_prompt_tokens=10**5), False)
        tools = [TOOL] if "tools" in template else None
        try:
            options = {"add_generation_prompt": True, "tools": tools, "return_dict": False}
            ids = tokenizer.apply_chat_template(TALKS[name], **options)
        except Exception:  # the template refuses it
            with pytest.raises(ValueError):
                renderer.begin(TALKS[name], tools)
            continue
        try:
            rendered = renderer.begin(TALKS[name], tools)
        except ValueError as exc:
            assert "it leaves out the message" in str(exc), file
            continue
        np.testing.assert_array_equal(rendered, ids, err_msg=file)
        read += 1
    assert read > 4


def test_turns_that_follow_are_what_transformers_makes_of_the_whole_or_are_refused():
    continued = 0
    for template, file in TEMPLATES.items():
        for end in ("<|im_end|>", "<|eot|>", "</s>", "<end_of_utterance>", "<|eot_id|>"):
            tokenizer = tokenizer_of(template, end)
            data = DataConfig(path="a", chat_template=True, max_prompt_tokens=10**5)
            first, answer, more = TALKS["turns"]
            try:
                renderer = Renderer(tokenizer, data, True)
            except ValueError:
                continue
            said = tokenizer(answer["content"] + end, add_special_tokens=False)["input_ids"]
            ids = [*renderer.begin([first]), *said, *renderer.after_turn([more], np.array(said, dtype=np.int32))]
            whole = tokenizer.apply_chat_template(TALKS["turns"], add_generation_prompt=True, return_dict=False)
            assert tokenizer.decode(ids) == tokenizer.decode(whole), file
            continued += 1
    assert continued > 2
