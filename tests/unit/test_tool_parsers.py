"""SGLang's own parsers find the calls and the reasoning in what agents get, on a template of every
supported family, with tokenizers whose markers are special tokens."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from contextlib import closing
from typing import get_args

import numpy as np
import pytest

from examples.laptop.model import character_tokenizer
from megagrpo.algo.statistics import alone
from megagrpo.config.data import DataConfig
from megagrpo.config.load import ConfigError
from megagrpo.config.rollout import AgentConfig, SamplingConfig
from megagrpo.data.chat_module import take_chat_module
from megagrpo.data.messages import render_messages
from megagrpo.data.texts import decoder
from megagrpo.models.folder import Model
from megagrpo.models.table import FAMILIES
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.agents.parsers import TurnParsers
from megagrpo.rollout.agents.programs import Programs
from megagrpo.rollout.generation import GenerationFailed
from megagrpo.rollout.service.engine_command import environment_without_gpu
from megagrpo.tools.check import loading
from megagrpo.tools.check.loading import LoadingTest
from tests.experiments import ROOT, experiment, read_experiment, until
from tests.unit.test_conversation import USER, talk

ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}" + ASK
)
QWEN3 = QWEN.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}",
)
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<@User@>{{ m.content }}{% elif m.role == 'tool' %}"
    "<@tool▁outputs▁begin@><@tool▁output▁begin@>{{ m.content }}<@tool▁output▁end@><@tool▁outputs▁end@>"
    "{% else %}<@Assistant@>{{ m.content }}{% if m.tool_calls %}<@tool▁calls▁begin@>{% for c in m.tool_calls %}"
    "{{ '<@tool▁call▁begin@>CALL<@tool▁call▁end@>' }}{% endfor %}<@tool▁calls▁end@>{% endif %}"
    "<@end▁of▁sentence@>{% endif %}{% endfor %}{% if add_generation_prompt %}<@Assistant@>{% endif %}"
)
V3 = "function<@tool▁sep@>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```"
V31 = "' + c.function.name + '<@tool▁sep@>' + c.function.arguments + '"
KIMI = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.get('name') or m.role }}<|im_middle|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{% if m.get('tool_calls') %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% else %}'
    "{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}</s>{% endif %}{% endfor %}"
)
MINIMAX = (
    "{% for m in messages %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}<minimax:tool_call>\n{% for c in m.tool_calls %}"
    '<invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}'
    "</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}[e~[\n{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n{% endif %}"
)
# as several repositories quote the published one
QWEN35 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if not loop.first %}\n{% elif m.content %}\n\n{% endif %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v | tojson if v is mapping else v | string }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# as docker/glm53-flash/chat_template.jinja of SGLang, which parses GLM-4.7, 5 and 5.3 alike
GLM5 = (
    "[gMASK]<sop>{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
# DeepSeek publishes a Python encoder; as models/templates/DeepSeek-V3.2.jinja of llama.cpp
DSML = "\uff5cDSML\uff5c"
DEEPSEEK_V32 = (
    "{% for m in messages %}{% if m.role == 'user' %}<@User@>{{ m.content }}<@Assistant@><think>"
    "{% elif m.role == 'assistant' %}{{ m.reasoning_content }}</think>{{ m.content }}{% if m.tool_calls %}"
    '\n\n<DSMLfunction_calls>{% for c in m.tool_calls %}\n<DSMLinvoke name="{{ c.function.name }}">'
    '{% for k, v in c.function.arguments.items() %}\n<DSMLparameter name="{{ k }}" '
    "string=\"{{ 'true' if v is string else 'false' }}\">{{ v if v is string else v | tojson }}</DSMLparameter>"
    "{% endfor %}\n</DSMLinvoke>{% endfor %}\n</DSMLfunction_calls>{% endif %}<@end▁of▁sentence@>"
    "{% elif m.role == 'tool' %}\n\n<function_results>\n<result>{{ m.content }}</result>\n"
    "</function_results>\n\n<think>{% endif %}{% endfor %}"
).replace("DSML", DSML)
# name: template, SGLang's parser of calls, the end of a turn, special tokens
HERMES = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_start|>"]
DEEP = [f"<@tool▁{word}@>" for word in (
    "calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin", "outputs▁end",
    "output▁begin", "output▁end",
)]  # fmt: skip
DEEP += ["<@User@>", "<@Assistant@>", "<think>", "</think>"]
KIMIS = [f"<|{word}|>" for word in (
    "tool_calls_section_begin", "tool_calls_section_end", "tool_call_begin", "tool_call_argument_begin",
    "tool_call_end", "im_user", "im_assistant", "im_system", "im_middle",
)]  # fmt: skip
GLMS = [*HERMES[:4], "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|user|>"]
MINIMAXES = ["<minimax:tool_call>", "</minimax:tool_call>", "]~b]", "<think>", "</think>"]
MODELS = {
    "Qwen2.5": (QWEN, "qwen25", "<|im_end|>", HERMES),
    "Qwen3": (QWEN3, "qwen25", "<|im_end|>", HERMES),
    "Llama-3.1": (LLAMA, "llama3", "<|eot_id|>", ["<|start_header_id|>", "<|python_tag|>"]),
    "DeepSeek-V3": (DEEPSEEK.replace("CALL", V3), "deepseekv3", "<@end▁of▁sentence@>", DEEP),
    "DeepSeek-V3.1": (DEEPSEEK.replace("CALL", V31), "deepseekv31", "<@end▁of▁sentence@>", DEEP),
    "Kimi-K2": (KIMI, "kimi_k2", "<|im_end|>", KIMIS),
    "GLM-4.5": (GLM, "glm45", "<|endoftext|>", GLMS),
    "MiniMax-M2": (MINIMAX, "minimax-m2", "[e~[", MINIMAXES),
    "Qwen3.5": (QWEN35, "qwen3_coder", "<|im_end|>", HERMES),
    "GLM-5": (GLM5, "glm47", "<|endoftext|>", GLMS),
    "DeepSeek-V3.2": (DEEPSEEK_V32, "deepseekv32", "<@end▁of▁sentence@>", [*DEEP[-4:], DSML]),
    # no template: SGLang's module writes its chats
    "DeepSeek-V4": ("", "deepseekv4", "<@end▁of▁sentence@>", [*DEEP[-4:], DSML]),
    "Mixtral": (MISTRAL, "mistral", "</s>", ["[TOOL_CALLS]", "[INST]", "[/INST]"]),
}
OF_FAMILY = {
    "llama": "Llama-3.1", "qwen2": "Qwen2.5", "qwen3": "Qwen3", "qwen3_moe": "Qwen3",
    "mixtral": "Mixtral", "glm4_moe": "GLM-4.5", "deepseek_v3": "DeepSeek-V3", "kimi_k2": "Kimi-K2",
    "qwen2_5_vl": "Qwen2.5", "qwen3_vl": "Qwen3", "qwen3_vl_moe": "Qwen3",
    "minimax_m2": "MiniMax-M2", "kimi_k25": "Kimi-K2",
    "qwen3_5_moe": "Qwen3.5", "qwen3_5_moe_text": "Qwen3.5", "qwen3_5": "Qwen3.5", "qwen3_5_text": "Qwen3.5",
    "glm_moe_dsa": "GLM-5", "glm4_moe_lite": "GLM-5", "deepseek_v32": "DeepSeek-V3.2", "qwen3_next": "Qwen3",
    "deepseek_v4": "DeepSeek-V4", "glm5_next": "GLM-5",
    "kimi_linear": "Kimi-K2", "nemotron_h": "Qwen3.5", "qwen4_exp": "Qwen3.5",  # calls in the same words
}  # fmt: skip
# a turn is asked for with <think>, which it is not written with; so turns are no continuation
BEGIN_A_THOUGHT = ("Qwen3.5", "GLM-5", "DeepSeek-V3.2")
REASONING = {  # name -> SGLang's parser of reasoning
    "Qwen3": "qwen3", "DeepSeek-V3": "deepseek-r1", "GLM-4.5": "glm45", "Qwen3.5": "qwen3", "GLM-5": "glm45",
    "DeepSeek-V3.2": "deepseek-v3",
    "DeepSeek-V4": "deepseek-v4",
}  # fmt: skip
ALPHABET = "".join(map(chr, range(32, 127))) + "\n\uff5c▁é"
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "number": {"type": "integer"}}},
    },
}
KIMIS = {
    what: "<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.look_up:{number}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for number in numbers
    )
    + "<|tool_calls_section_end|>"
    for what, numbers in {"named": "45", "named twice": "44", "named again": "454"}.items()
} | {"degenerate": "functions." * 100_000}
PIECES = [*"a 12{}[]<>|#,:\"'\\\n", "  ", "\n\n", "\\n", "</", "&amp;", "é", "true", "null", "1e5", "0.50", "123_456"]
PIECES += ["```", "<b>", "x: y", "- z", '{"a": 1}', "[1, 2]", "//"]
ARGUMENTS = [{"word": "a b", "number": 2}, {"word": 'say "é"\n'}]
PROGRAM = """
import json, sys
from sglang.srt.function_call.parser_names import TOOL_CALL_PARSER_NAMES
from sglang.srt.parser.reasoning_parser_names import REASONING_PARSER_NAMES
from megagrpo.rollout.service.parser_worker import parse
names = TOOL_CALL_PARSER_NAMES, REASONING_PARSER_NAMES
print(json.dumps([names, [parse(*turn) for turn in json.load(sys.stdin)]]))
"""


BAR = "\uff5c"  # of DeepSeek's markers, which are written <@...@> above
MODELS = {
    name: tuple(json.loads(json.dumps(part).replace("<@", "<" + BAR).replace("@>", BAR + ">")) for part in parts)
    for name, parts in MODELS.items()
}


def tokenizer_of(name: str):
    template, _, end, marks = MODELS[name]
    made = character_tokenizer(ALPHABET)
    made.add_special_tokens({"additional_special_tokens": [*marks, end], "eos_token": end})
    made.chat_template = "{# tools: the excerpts leave out how they are written #}" + template
    if name == "DeepSeek-V4":
        take_chat_module(made, FAMILIES["deepseek_v4"].CHAT_MODULE)
    return made


def heard(tokenizer, text: str, folder, skip_special_tokens: bool = False) -> str:
    """What an agent's parsers get when the model has sampled a text."""
    decode = decoder(
        tokenizer, Model(folder, folder, {}, False), SamplingConfig(skip_special_tokens=skip_special_tokens)
    )
    return decode(np.array(tokenizer(text, add_special_tokens=False)["input_ids"]))


def drawn(seed: int) -> dict[str, object]:
    """Arguments of a call, of pieces that templates and parsers quote, cut or read as numbers."""
    chance = random.Random(seed)
    word = "".join(chance.choices(PIECES, k=chance.randint(1, 4)))
    return {"word": word} | ({"number": chance.choice([0, -3, 10**12])} if chance.random() < 0.5 else {})


def as_sglang_reads(name: str, arguments: dict) -> dict:
    """Arguments with what SGLang's parser of a family changes in a text, as it does in a deployment: quotes around it,
    and a number that is declared to be a text. Some also drop white space around it."""
    word = arguments["word"].strip()
    if name in ("GLM-4.5", "GLM-5"):
        word = re.sub(r"""(?s)\A(['"])(.*)\1\Z""", r"\2", word)
    if name == "GLM-4.5" and re.fullmatch(r"-?\d+(\.\d+)?(e\d+)?", word):
        word = str(json.loads(word))
    return arguments | {"word": word.strip()}


def turn_of(tokenizer, arguments: list[dict], content: str = "") -> str:
    """A turn of the model with these calls, as the template writes it."""
    calls = [
        {
            "id": f"functions.look_up:{index}",
            "type": "function",
            "function": {"name": "look_up", "arguments": json.dumps(given, ensure_ascii=False)},
        }
        for index, given in enumerate(arguments)
    ]
    asked = [{"role": "user", "content": "a"}]
    data = DataConfig(path="a.jsonl", chat_template=True)
    turn = {"role": "assistant", "content": content, "tool_calls": calls}
    before = render_messages(data, tokenizer, asked, True, [TOOL])
    whole = render_messages(data, tokenizer, [*asked, turn], False, [TOOL])
    assert whole.startswith(before)
    return whole.removeprefix(before).rstrip()


@pytest.fixture(scope="module")
def parsed(tmp_path_factory):
    """What the parsers make of turns, in one process for all tests: {(name, what): message's parts},
    and SGLang's names."""
    folder = tmp_path_factory.mktemp("model")
    turns = {}
    for name, (_, parser, *_) in MODELS.items():
        tokenizer = tokenizer_of(name)
        texts = {"one": heard(tokenizer, turn_of(tokenizer, ARGUMENTS[:1]), folder)}
        if name != "Llama-3.1":  # whose template takes one
            texts["two"] = heard(tokenizer, turn_of(tokenizer, ARGUMENTS), folder)
            texts["said"] = heard(tokenizer, turn_of(tokenizer, ARGUMENTS[:1], "I look."), folder)
        texts["stripped"] = heard(tokenizer, turn_of(tokenizer, ARGUMENTS[:1]), folder, True)
        texts["none"] = "I do not know."
        texts |= {str(seed): heard(tokenizer, turn_of(tokenizer, [drawn(seed)]), folder) for seed in range(30)}
        for what, text in texts.items():
            turns[name, what] = text, [TOOL["function"]], "c-", parser, ""
    for name, parser in REASONING.items():
        text = "<think>2 and 3</think>five" + MODELS[name][2]
        turns[name, "thought"] = heard(tokenizer_of(name), text, folder), [], "", "", parser
        turns[name, "no thought"] = heard(tokenizer_of(name), text.replace("2 and 3", ""), folder), [], "", "", parser
    for what, word in {"half": "\\ud800", "whole": "\\ud83d\\ude00"}.items():
        call = f'<tool_call>\n{{"name": "look_up", "arguments": {{"word": "{word}"}}}}\n</tool_call>'
        turns["Qwen3", what] = call, [TOOL["function"]], "c-", "qwen25", ""
    for what, text in KIMIS.items():
        turns["Kimi-K2", what] = text, [TOOL["function"]], "c-", "kimi_k2", ""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(list(turns.values())),
        env=environment_without_gpu(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    names, found = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(turns, found, strict=True)) | {"names": names}


def calls_of(message: dict) -> list[list[object]]:
    """[name, arguments] of the calls of a message, or of its parts."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [[function["name"], json.loads(function["arguments"])] for function in functions]


def test_every_family_has_a_template_here():
    without = {"gpt_oss"}  # Harmony
    assert set(OF_FAMILY) == set(FAMILIES) - without and set(OF_FAMILY.values()) <= set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_calls_are_found_where_markers_are_special_tokens(parsed, name):
    wanted = [["look_up", dict(arguments)] for arguments in ARGUMENTS]
    if name in ("MiniMax-M2", "DeepSeek-V3.2", "DeepSeek-V4"):  # SGLang's parsers drop a value's last line break
        wanted[1][1]["word"] = wanted[1][1]["word"].rstrip("\n")
    for what, expected in (("one", wanted[:1]), ("two", wanted), ("said", wanted[:1])):
        if (name, what) in parsed:
            assert calls_of(parsed[name, what]) == expected
    assert parsed[name, "none"] == {}, "the text is the message"
    # with the other choice of sampling.skip_special_tokens only Llama's, which has no markers
    assert bool(calls_of(parsed[name, "stripped"])) == (name == "Llama-3.1")


@pytest.mark.parametrize("name", MODELS)
def test_calls_are_found_as_they_were_generated(parsed, name):
    for seed in range(30):
        ((_, found),) = calls_of(parsed[name, str(seed)])
        wanted = drawn(seed)
        if name in ("MiniMax-M2", "GLM-4.5", "GLM-5", "DeepSeek-V3.2", "DeepSeek-V4"):
            found["word"] = found["word"].strip()
            wanted = as_sglang_reads(name, wanted)
        assert found == wanted


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_is_found_where_its_tags_are_special_tokens(parsed, name):
    assert parsed[name, "thought"] == {"content": "five", "reasoning_content": "2 and 3"}
    assert parsed[name, "no thought"] == {"content": "five", "reasoning_content": ""}, "no tag is left"


@pytest.mark.parametrize(("what", "word"), [("half", "\ufffd"), ("whole", "\U0001f600")])
def test_half_a_character_in_a_call_is_replaced(parsed, what, word):
    assert calls_of(parsed["Qwen3", what]) == [["look_up", {"word": word}]]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("history", ["all", "last"])
def test_check_tries_a_turn_with_a_tool(name, history, tmp_path, monkeypatch):
    _, parser, *_ = MODELS[name]
    agent = {"command": ["true"], "tool_parser": parser, "history": history}
    config = experiment(data={"path": "a.jsonl", "chat_template": True}, sampling={"agent": agent})
    jobs = []
    monkeypatch.setattr(loading, "_parsed_by_sglang", lambda *job: jobs.append(job) or [["add", {"a": 2}]])
    trial = LoadingTest()
    model = Model(tmp_path, tmp_path, {}, False)
    if name in BEGIN_A_THOUGHT and history == "all":
        with pytest.raises(ValueError, match="cannot be continued turn by turn.*history: last"):
            loading._try_tool_turn(config, config.sampling.agent, model, tokenizer_of(name), trial)
        return
    loading._try_tool_turn(config, config.sampling.agent, model, tokenizer_of(name), trial)
    ((text, by),) = jobs
    assert "add" in text and MODELS[name][2] not in text and by == parser
    assert trial.loaded == [f"a tool call, written by the template, parsed by {parser}"]
    monkeypatch.setattr(loading, "_parsed_by_sglang", lambda *_: [])
    with pytest.raises(ValueError, match=f"tool_parser {parser}: in the turn .* it finds no call"):
        loading._try_tool_turn(config, config.sampling.agent, model, tokenizer_of(name), trial)


def test_kimis_calls_keep_the_names_that_the_model_gave_them(parsed):
    def ids(what: str) -> list[str]:
        return [call["id"] for call in parsed["Kimi-K2", what]["tool_calls"]]

    assert ids("named") == ["functions.look_up:4", "functions.look_up:5"]
    assert ids("named twice") == ["c-000", "c-001"]
    assert ids("named again") == ["c-000", "c-001", "c-002"]
    assert parsed["Kimi-K2", "degenerate"] == {}


def test_a_parser_that_sglang_does_not_have_is_refused(parsed):
    """By every command: the experiment cannot be read."""
    keys = ("tool_parser", "reasoning_parser")
    for key, names in zip(keys, parsed["names"], strict=True):
        choices = get_args(AgentConfig.model_fields[key].annotation)
        assert sorted([*choices, "hunyuan"]) == sorted(["", *names]), "its parsers read a tokenizer"
    wrong = "{function: 'a:b', tool_parser: qwen_25, reasoning_parser: qwen_3}"
    settings = ["sampling.environment=null", f"sampling.agent={wrong}"]
    with pytest.raises(ConfigError) as error:
        read_experiment(ROOT / "configs" / "lake.yaml", settings)
    for key, name in zip(keys, ("qwen25", "qwen3"), strict=True):
        assert re.search(f"agent.{key} = .*: not a choice; did you mean '{name}'", str(error.value))


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": 2}}\n</tool_call>'
FOUND = [["look_up", {"number": 2}]]


def pids_of(parsers: TurnParsers) -> list[int]:
    return [slot.process._process.pid for slot in parsers._slots if slot.process is not None]


def parsing(parsers: TurnParsers, text: str, tools=(TOOL,)) -> asyncio.Task:
    return asyncio.create_task(parsers.message(text, tools, "c1-"))


async def both_answer(parsers: TurnParsers) -> None:
    for message in await asyncio.gather(parsing(parsers, CALL), parsing(parsers, CALL)):
        assert calls_of(message) == FOUND


def test_a_turn_that_no_parser_reads_is_its_text_and_holds_no_other():
    """In real processes: one ends the turn and answers on, one is killed."""
    degenerate = "<tool_call>\n" * 160_000  # minutes

    async def turns(parsers: TurnParsers) -> None:
        assert await parsing(parsers, "12", None) == {"role": "assistant", "content": "12"}
        thought = await parsing(parsers, f"<think>two sums</think>so {CALL}\n{CALL}")
        assert thought["reasoning_content"] == "two sums" and thought["content"] == "so"
        assert [call["id"] for call in thought["tool_calls"]] == ["c1-000", "c1-001"]
        assert calls_of(thought) == FOUND * 2
        for text in ("12", f"so {CALL.replace('look_up', 'unknown')}", "so <tool_call>\n{oops"):
            assert await parsing(parsers, text) == {"role": "assistant", "content": text}
        assert len(pids_of(parsers)) == 1, "the second starts with a turn that finds none idle"

        before, text = pids_of(parsers), {"role": "assistant", "content": degenerate}
        assert parsers.unparsed == 0
        assert await parsing(parsers, degenerate) == text
        assert parsers.unparsed == 1 and pids_of(parsers) == before
        assert calls_of(await parsing(parsers, CALL)) == FOUND, "it reads the next turn"

        os.kill(before[0], signal.SIGSTOP)
        lost = parsing(parsers, degenerate)
        await asyncio.sleep(0.1)
        os.kill(before[0], signal.SIGKILL)
        assert await lost == text and parsers.unparsed == 2
        await both_answer(parsers)
        assert before[0] not in pids_of(parsers)

    with closing(TurnParsers("qwen25", "qwen3")) as parsers:
        asyncio.run(turns(parsers))
    until(lambda: not pids_of(parsers))


def test_a_slow_turn_holds_no_other_and_a_cancelled_one_ends_no_process():
    """A process that is stopped parses endlessly."""

    async def turns(parsers: TurnParsers) -> None:
        def asked() -> asyncio.Task:
            conversation, _ = talk("12", tool_parser="qwen25", parse=parsers.message)
            return asyncio.create_task(conversation.say([USER], [TOOL]))

        gone = asked()  # while a process starts for it
        while not (started := parsers._slots[0]._processes + parsers._slots[1]._processes):
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        await both_answer(parsers)
        async with asyncio.timeout(60):  # the other process may be ready first
            while len(pids := pids_of(parsers)) < 2:
                await asyncio.sleep(0.01)
        assert started[0]._process.pid in pids

        for held, other in (pids, pids[::-1]):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            waiting = [asked() for _ in range(5)]
            os.kill(other, signal.SIGCONT)
            async with asyncio.timeout(60):
                while sum(turn.done() for turn in waiting) < 4:
                    await asyncio.sleep(0.01)
            # none if the held process has a turn whose caller is gone
            for slow in [turn for turn in waiting if not turn.done()]:
                slow.cancel()
                await asyncio.wait([slow])
            os.kill(held, signal.SIGCONT)
            await both_answer(parsers)
            assert pids_of(parsers) == pids
        assert parsers.unparsed == 0

    with closing(TurnParsers("qwen25", "")) as parsers:
        asyncio.run(turns(parsers))


def test_a_parser_that_catches_exits_is_ended_with_its_process():
    degenerate = "<|python_tag|>" + '{"name": x ' * 40_000  # minutes

    async def turns(parsers: TurnParsers) -> None:
        assert calls_of(await parsing(parsers, CALL)) == []
        async with asyncio.timeout(60):  # the limit of a process that hangs is longer
            assert (await parsing(parsers, degenerate))["content"] == degenerate
        assert parsers.unparsed == 1

    with closing(TurnParsers("llama3", "")) as parsers:
        asyncio.run(turns(parsers))


def test_parsers_that_do_not_start_end_the_run():
    with (
        closing(TurnParsers("qwen_25", "")) as parsers,
        pytest.raises(GenerationFailed, match="tool_parser.*: SGLang's parsers do not start"),
    ):
        asyncio.run(parsers.message(CALL, [TOOL], ""))


def test_turns_that_no_parser_reads_are_counted():
    agent = AgentConfig(function="tests.sums_agent:sums", tool_parser="qwen25")
    programs, counts = Programs(agent, None, "127.0.0.1", "policy"), []
    programs._parsers.unparsed = 3
    for _ in range(2):
        programs.add_metrics(metrics := Metrics())
        counts.append(metrics.reduced(alone)["agent/unparsed_turns"])
    programs.close()
    assert counts == [3, 0]
