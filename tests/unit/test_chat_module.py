"""DeepSeek-V4 has no chat template: SGLang's module writes prompts, tools and the turns of environments."""

import json
from pathlib import Path

import numpy as np
import pytest

from examples.laptop.model import character_tokenizer
from megagrpo.config.data import DataConfig
from megagrpo.data.messages import render_messages
from megagrpo.data.prompts import load_tokenizer, require_template
from megagrpo.models.folder import Model
from megagrpo.rollout.agents.renderer import Renderer

BAR = "\uff5c"
BEGIN, END = f"<{BAR}begin▁of▁sentence{BAR}>", f"<{BAR}end▁of▁sentence{BAR}>"
USER, ASSISTANT = f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>"
MARKS = [BEGIN, END, USER, ASSISTANT, "<think>", "</think>", f"{BAR}DSML{BAR}"]
ASK = [{"role": "user", "content": "2+3?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}


def folder(path: Path, model_type: str = "deepseek_v4", template: str = "") -> Path:
    made = character_tokenizer("".join(map(chr, range(32, 127))) + "\n" + BAR + "▁")
    made.add_special_tokens({"additional_special_tokens": MARKS, "eos_token": END})
    if template:
        made.chat_template = template
    made.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 1000}))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(Model.read(folder(tmp_path_factory.mktemp("v4"))))


def data(**arguments: object) -> DataConfig:
    return DataConfig.model_validate({"path": "a.jsonl", "chat_template": True, "chat_template_args": arguments})


def test_prompts_are_written_as_published(tokenizer):
    require_template(data(), tokenizer)
    asked = f"{BEGIN}{USER}2+3?{ASSISTANT}"
    assert render_messages(data(), tokenizer, ASK) == asked + "</think>"
    assert render_messages(data(thinking=True), tokenizer, ASK) == asked + "<think>"
    assert render_messages(data(), tokenizer, ASK, ready=False) == f"{BEGIN}{USER}2+3?"
    told = [{"role": "system", "content": "Be brief."}, *ASK]
    assert render_messages(data(), tokenizer, told) == f"{BEGIN}Be brief.{USER}2+3?{ASSISTANT}</think>"
    effort = render_messages(data(thinking=True, reasoning_effort="max"), tokenizer, ASK)
    assert effort.startswith(f"{BEGIN}Reasoning Effort: Absolute maximum") and effort.endswith("<think>")
    assert render_messages(data(thinking=True, reasoning_effort="high"), tokenizer, ASK) == asked + "<think>"
    official = data(thinking=True, reasoning_effort="high", reasoning_effort_profile="official")
    assert render_messages(official, tokenizer, ASK) == effort
    parts = [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]}]
    assert render_messages(data(), tokenizer, parts) == asked + "</think>"


def test_tools_calls_and_outputs(tokenizer):
    with_tools = render_messages(data(), tokenizer, ASK, tools=[TOOL])
    assert '\n{"name": "add", "parameters": {"type": "object"}}\n' in with_tools and USER in with_tools
    turn = {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}
    told = {"role": "tool", "tool_call_id": "c1", "content": "5"}
    text = render_messages(data(), tokenizer, [*ASK, turn, told], tools=[TOOL])
    call = f'<{BAR}DSML{BAR}invoke name="add">\n<{BAR}DSML{BAR}parameter name="a" string="false">2</'
    assert text.startswith(with_tools + "I add.\n\n") and call in text
    assert text.endswith(f"{END}{USER}<tool_result>5</tool_result>{ASSISTANT}</think>")


def test_turns_of_an_environment_follow_those_of_the_model(tokenizer):
    renderer = Renderer(tokenizer, data(), continues=True)
    answer = np.array([tokenizer.eos_token_id])
    told = [{"role": "tool", "tool_call_id": "c1", "content": "5"}]
    for message, text in (("more?", "more?"), (told, "<tool_result>5</tool_result>")):
        ids = renderer.after_turn(message, answer)
        assert tokenizer.decode(ids) == f"{USER}{text}{ASSISTANT}</think>"
    with pytest.raises(ValueError, match="cannot be continued turn by turn.*history: last"):
        Renderer(tokenizer, data(thinking=True), continues=True)


@pytest.mark.parametrize(
    ("messages", "arguments", "said"),
    [
        ([*ASK, {"role": "assistant", "content": "5"}], {}, "a turn of the model follows a message of the user"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "the content of a message is a text"),
        ([{"role": "critic", "content": "no"}], {}, "Unknown role: critic"),
        (ASK, {"thinking": True, "reasoning_effort": "huge"}, "Invalid reasoning effort 'huge'"),
        (ASK, {"enable_thinking": True}, "unexpected keyword argument 'enable_thinking'"),
    ],
)
def test_what_it_cannot_write_is_refused(tokenizer, messages, arguments, said):
    with pytest.raises((ValueError, NotImplementedError, TypeError), match=said):
        render_messages(data(**arguments), tokenizer, messages)


def test_other_models_and_templates_are_left_alone(tmp_path):
    own = load_tokenizer(Model.read(folder(tmp_path / "own", template="{{ messages[0].content }}")))
    assert render_messages(data(), own, ASK) == "2+3?"
    other = load_tokenizer(Model.read(folder(tmp_path / "other", "deepseek_v3")))
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        require_template(data(), other)
