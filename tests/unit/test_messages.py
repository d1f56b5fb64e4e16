"""One rendering for the same messages, however they come: JSON lines, Parquet, environments, agents."""

import json
from datetime import UTC, datetime

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from examples.laptop.model import character_tokenizer
from megagrpo.config.data import DataConfig
from megagrpo.config.rollout import SamplingConfig
from megagrpo.data.messages import checked_messages
from megagrpo.data.prompts import load_prompts
from megagrpo.data.texts import decoder
from megagrpo.models.folder import Model

END = "{% if add_generation_prompt %}<assistant>{% endif %}"
# What the templates of these models do with the parts of a message, not their words.
TEMPLATES = {
    "Qwen2.5": (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}|{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "{% endfor %}{% endfor %}"
    ),
    "Qwen3": (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.reasoning_content is defined and m.reasoning_content is not none %}"
        "({{ m.reasoning_content }}){% endif %}{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        "{{ c.function.name }}{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    ),
    "Llama-3.1": (
        "{% for m in messages %}<{{ m.role }}>{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call') }}{% endif %}{{ m.tool_calls[0].function.arguments | tojson }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "DeepSeek-V3": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '|' + c.function.name + '\n' + c.function.arguments + '|' }}{% endfor %}{% endfor %}"
    ),
    "Kimi-K2": (
        "{% for m in messages %}<{{ m.get('name') or m.role }}>{{ m.content }}{% for c in m.get('tool_calls') or [] %}"
        "{{ c.id }}{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}"
    ),
    "GLM-4.5": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}"
    ),
}  # fmt: skip
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
PLAIN = [{"role": "user", "content": "2+3"}]
TOOLS_USED = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+3"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "5"},
]
SPELLED = "".join(sorted(set(map(chr, range(32, 127))))) + "\n"


@pytest.fixture
def plain():
    made = character_tokenizer(SPELLED)
    made.chat_template = TEMPLATES["Qwen2.5"] + END
    return made


def written(path, rows) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def as_object(messages):
    """The same messages with arguments as an object, as some data sets have them."""
    function = {**CALL["function"], "arguments": {"a": 2, "b": 3}}
    call = {**CALL, "function": function}
    return [{**m, **({"tool_calls": [call]} if "tool_calls" in m else {})} for m in messages]


def test_members_that_are_null_are_left_out_at_any_depth():
    """Arrow fills them in, in the objects of a list as well."""
    given = {"role": "user", "name": None, "tool_calls": [{"id": "1", "function": None}], "a": [None]}
    found = {"role": "user", "tool_calls": [{"id": "1"}], "a": [None]}
    assert checked_messages([given]) == [found]


def row_error(tmp_path, tokenizer, prompt, **keys) -> str:
    rows = [{"prompt": PLAIN, "answer": "5"}, {"prompt": prompt, "answer": "5"}]
    data = DataConfig(path=written(tmp_path / "a.jsonl", rows), chat_template=True, **keys)
    with pytest.raises(ValueError) as raised:
        load_prompts(data, tokenizer)
    return str(raised.value)


@pytest.mark.parametrize(
    "prompt, said",
    [
        ([{"role": "user", "content": None}], "message 1 has no content, a text or parts, and no tool calls"),
        ([*PLAIN, {"role": "user", "content": "\ud83d"}], "message 2 holds half of a character"),
        ([{"role": "user"}], "message 1 has no content"),
        ([{"content": "2+3"}], "should be a list of {role, content}"),
        ([*PLAIN, {"role": "user", "content": 5}], "message 2 has no content, a text or parts, and no tool calls: 5"),
        ([{"role": "user", "content": {"text": "2+3"}}], "no tool calls: {'text': '2+3'}"),
        ([{"role": None, "content": "2+3"}], "should be a list of {role, content}"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"detail": ""}}]}], "has 1 <image>"),
    ],
)
def test_a_message_that_cannot_be_meant_is_named_by_its_row(tmp_path, plain, prompt, said):
    message = row_error(tmp_path, plain, prompt)
    assert "a.jsonl:2" in message and said in message


KNOWN = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<{{ m.role }}>"
    "{{ m.content | replace('/think', '') }}{% endif %}{% endfor %}{% if mode is defined %}{{ mode }}{% endif %}"
)


TEXTS_ALONE = "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string }}{% endfor %}"


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_content_in_parts_of_texts_is_a_text(tmp_path, plain, role):
    """Qwen3's template writes an empty message for any other."""
    plain.chat_template = TEXTS_ALONE
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "3"}]
    prompt = [{"role": role, "content": parts}, {"role": "user", "content": parts[1:]}]
    assert texts(tmp_path, plain, [{"prompt": prompt, "answer": ""}]) == [f"<{role}>2+3<user>3"]


@pytest.mark.parametrize("role", ["developer", "User", "tool"])
def test_a_message_that_the_template_leaves_out_is_refused(tmp_path, plain, role):
    plain.chat_template = KNOWN
    said = row_error(tmp_path, plain, [{"role": role, "content": "be brief"}, *PLAIN])
    assert "a.jsonl:2: the chat template refuses this prompt" in said
    assert f"it leaves out the message of the role {role!r}" in said
    part_of_another = row_error(tmp_path, plain, [*PLAIN, {"role": role, "content": "3"}])
    assert f"it leaves out the message of the role {role!r}" in part_of_another
    read = texts(tmp_path, plain, [{"prompt": [{"role": "user", "content": "2+3/think"}], "answer": ""}])
    assert read == ["<user>2+3"]  # written in another way


def test_texts_that_others_contain_need_no_further_rendering(tmp_path, plain, monkeypatch):
    """An agent's conversation may say `ok` a hundred times, and every turn renders all of it."""
    plain.chat_template = KNOWN
    render, rendered = type(plain).apply_chat_template, []
    monkeypatch.setattr(type(plain), "apply_chat_template", lambda *of, **how: rendered.append(1) or render(*of, **how))
    chat = [{"role": "user", "content": text} for text in ("ok", "1", "ok, 12", "ok")]
    assert texts(tmp_path, plain, [{"prompt": chat, "answer": ""}]) == ["<user>ok<user>1<user>ok, 12<user>ok"]
    assert len(rendered) == 1


def test_tools_that_the_template_leaves_out_are_refused(tmp_path, plain):
    plain.chat_template = KNOWN
    tool = {"type": "function", "function": {"name": "add"}}
    with pytest.raises(ValueError, match=r"t.jsonl:1: .*it leaves out the tools"):
        texts(tmp_path, plain, [{"prompt": PLAIN, "answer": "", "tools": [tool]}], tools_key="tools")


def test_an_argument_that_the_template_does_not_read_is_refused(tmp_path, plain):
    plain.chat_template = KNOWN
    assert texts(tmp_path, plain, [{"prompt": PLAIN, "answer": ""}], chat_template_args={"mode": "4"}) == ["<user>2+34"]
    said = row_error(tmp_path, plain, PLAIN, chat_template_args={"enable_thinkng": False})
    assert said == "data.chat_template_args: the chat template has no 'enable_thinkng'"


def texts(tmp_path, tokenizer, rows, **keys) -> list[str]:
    data = DataConfig(path=written(tmp_path / "t.jsonl", rows), chat_template=True, **keys)
    return [prompt.text for prompt in load_prompts(data, tokenizer).prompts]


def test_a_time_in_a_parquet_file_ends_no_run(tmp_path, plain):
    """As WildChat has one in each message: graders and environments get messages as JSON, and so do checkpoints."""
    when = datetime(2024, 5, 6, tzinfo=UTC)
    tool = {"type": "function", "function": {"name": "add", "since": when}}
    row = {"prompt": [PLAIN[0] | {"timestamp": when}], "answer": "5", "tools": [tool]}
    path = written(tmp_path / "t.parquet", [row])
    [prompt] = load_prompts(DataConfig(path=path, chat_template=True, tools_key="tools"), plain).prompts
    written_as = f"{when:%Y-%m-%d %H:%M:%S.%f}Z"
    assert json.loads(json.dumps(prompt.messages)) == [PLAIN[0] | {"timestamp": written_as}]
    assert json.loads(json.dumps(prompt.tools))[0]["function"] == {"name": "add", "since": written_as}


def test_the_prompt_template_reaches_the_last_message_of_the_user(tmp_path, plain):
    again = [*PLAIN, {"role": "assistant", "content": "5"}, {"role": "user", "content": "4+4"}]
    rows = [{"prompt": p, "answer": ""} for p in ("2+3", PLAIN, again)]
    assert texts(tmp_path, plain, rows, prompt_template="{prompt} in a box") == [
        "<user>2+3 in a box<assistant>",
        "<user>2+3 in a box<assistant>",
        "<user>2+3<assistant>5<user>4+4 in a box<assistant>",
    ]
    assert "needs a message of the user" in row_error(
        tmp_path, plain, [{"role": "system", "content": "x"}], prompt_template="{prompt}!"
    )


def test_a_rows_tools_reach_its_template(tmp_path, plain):
    tool = {"type": "function", "function": {"name": "add", "strict": None}}
    rows = [
        {"prompt": "2+3", "answer": "", "tools": [tool]},
        {"prompt": "2+3", "answer": "", "tools": "\n" + json.dumps([tool], indent=1)},
        {"prompt": "2+3", "answer": ""},
    ]
    with_tool = '[{"type": "function", "function": {"name": "add"}}]<user>2+3<assistant>'
    assert texts(tmp_path, plain, rows, tools_key="tools") == [with_tool, with_tool, "<user>2+3<assistant>"]
    inside = [{"prompt": "2+3", "answer": "", "of": {"tools": [tool]}}]
    assert texts(tmp_path, plain, inside, tools_key="of.tools") == [with_tool]
    rows[0]["tools"] = ["add"]
    with pytest.raises(ValueError, match=r"t.jsonl:1: 'tools' should be a list of"):
        texts(tmp_path, plain, rows, tools_key="tools")


@pytest.fixture
def marked(plain, tmp_path):
    """A tokenizer whose markers are special tokens, and a model that ends at two of them."""
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<pad>"]
    plain.add_special_tokens({"additional_special_tokens": marks})
    plain.pad_token = "<pad>"
    ends = [plain.eos_token_id, plain.convert_tokens_to_ids("<|im_end|>")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return plain, Model(tmp_path, tmp_path, {}, False)


@pytest.mark.parametrize("end", ["", "<|im_end|>", "EOS"])
def test_graders_see_special_tokens_but_the_end_and_padding(marked, end):
    tokenizer, model = marked
    end = end.replace("EOS", tokenizer.eos_token)
    text = '<think>2+3</think><tool_call>{"name": "add"}</tool_call>'
    ids = np.array(tokenizer(text + end, add_special_tokens=False)["input_ids"])
    padded = np.concatenate([[tokenizer.pad_token_id], ids])
    assert decoder(tokenizer, model)(ids) == decoder(tokenizer, model)(padded) == text
    assert decoder(tokenizer, model, SamplingConfig(skip_special_tokens=True))(ids) == '2+3{"name": "add"}'
