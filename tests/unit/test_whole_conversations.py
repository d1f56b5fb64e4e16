"""A row that is a conversation, with tools: all of it reaches the model, agents and graders."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_service import FakeService
from sampling import experiment, playing, sampled
from test_built_in_environments import COMMAND, url  # noqa: F401  a fixture

from examples.laptop.model import character_tokenizer
from megagrpo.config.reward import RewardConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.prompts import load_prompts
from megagrpo.environments.answers import answer_grader
from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout.agents.answering import RolloutTask
from megagrpo.rollout.agents.renderer import Renderer
from megagrpo.types import Prompt
from tests.experiments import ROOT

QUESTION = "What is x + 6?"
TALK = [
    {"role": "system", "content": "Answer in hexadecimal."},
    {"role": "user", "content": "Let x be 20."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": QUESTION},
]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
TOOL_USED = [
    TALK[0],
    TALK[1],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": QUESTION},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOKENIZER = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
TOKENIZER.chat_template = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<{{ m.role }}{{ '+' if tools }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    "{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = TOKENIZER.eos_token


def says(text: str) -> dict:
    tokens = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
    return {"output_token_logprobs": [[-0.25, token, None] for token in tokens]}


def config_of(folder: Path, row: dict, sampling: dict, **data) -> ExperimentConfig:
    (folder / "rows.jsonl").write_text(json.dumps({"answer": "1a", "extra": {}} | row) + "\n")
    data = {"path": str(folder / "rows.jsonl"), "max_prompt_tokens": 4096, **data}
    return experiment(
        data=data | {"chat_template": True, "extra_key": "extra"},
        train={"group_size": 1},
        algorithm={"advantage": {"name": "reinforce_plus_plus"}},
        sampling={"max_response_tokens": 64, "stop_token_ids": [TOKENIZER.eos_token_id]} | sampling,
    )


def played(config: ExperimentConfig, *turns: str) -> tuple[Prompt, list[str]]:
    """(the prompt, what the model read before each turn)"""
    (prompt,) = load_prompts(config.data, TOKENIZER).prompts
    service = FakeService(version=3, script=list(map(says, turns)))
    with playing(config, TOKENIZER, service) as source:
        [group] = sampled(source, 7, [prompt], 3)
    assert group.outcomes[0].ok, group.outcomes
    return prompt, [TOKENIZER.decode(request["input_ids"]) for request in service.requests]


PLAYED = {
    "calculator": ({}, {}, re.escape(QUESTION)),
    "sql": ({}, {"database": "create table t (a)"}, re.escape(QUESTION)),
    "python": ({"grader": "exact"}, {}, r"You may write Python.*\n\n" + re.escape(QUESTION)),
    "mcp": ({"grader": "exact", "command": COMMAND, "timeout_s": 7.0}, {}, r".*<tools>.*" + re.escape(QUESTION)),
    "gymnasium": ({"id": "FrozenLake-v1"}, {"desc": ["SF", "HG"]}, r"\s*\[S\]F\nHG\n"),
    "openenv": ({"observation": "text"}, {"level": 3}, r'reset {"seed": \d+, "level": 3}'),
    "tests.games:Opens": ({}, {}, "Map: " + re.escape(QUESTION)),
}


@pytest.mark.parametrize("talk", [TALK, TALK[-1:], TOOL_USED], ids=["talk", "question", "tool"])
@pytest.mark.parametrize("name", PLAYED)
def test_an_environments_words_take_the_place_of_the_last_ones(name, talk, tmp_path, request):
    """System message, earlier turns and tools stay, as does the role of the last message."""
    args, extra, said = PLAYED[name]
    if name in ("mcp", "gymnasium"):
        pytest.importorskip(name)
    if name == "openenv":
        args = args | {"url": request.getfixturevalue("url")}
    answer = "select a from t" if name == "sql" else "1a"
    row = {"prompt": talk, "extra": extra, "answer": answer, "tools": [TOOL]}
    environment = {"function": name, "args": args, "max_turns": 1, "workers": 1}
    config = config_of(tmp_path, row, {"environment": environment}, tools_key="tools")
    prompt, (text,) = played(config, "1a")
    before, after = prompt.text.split(QUESTION)
    assert text.startswith(before) and text.endswith(after), text
    assert re.fullmatch(said, text[len(before) : -len(after)], re.DOTALL), text


@pytest.mark.parametrize("history", ["all", "last"])
def test_what_an_environment_says_next_is_written_with_the_rows_tools(history, tmp_path):
    row = {"prompt": TALK, "tools": [TOOL]}
    environment = {"function": "tests.games:Opens", "history": history, "workers": 1}
    config = config_of(tmp_path, row, {"environment": environment}, tools_key="tools")
    prompt, (first, second) = played(config, "3", "4")
    assert first == prompt.text.replace(QUESTION, "Map: " + QUESTION)
    grown = f"{first}3{END}<user+>on<assistant>"
    assert second == (grown if history == "all" else prompt.text.replace(QUESTION, "on"))


def test_messages_of_an_environment_are_all_but_the_system_message(tmp_path):
    row = {"prompt": TALK, "tools": [TOOL]}
    environment = {"function": "tests.games:Opens", "args": {"whole": True}, "workers": 1}
    config = config_of(tmp_path, row, {"environment": environment}, tools_key="tools")
    prompt, (text, _) = played(config, "3", "4")
    assert text == prompt.text.removesuffix("<assistant>") + "<user+>More?<assistant>"
    renderer = Renderer(TOKENIZER, config.data, True)
    own = [{"role": "system", "content": "Be brief."}, TALK[-1]]
    text = TOKENIZER.decode(renderer.start(own, prompt))
    assert text.endswith(f"]<system+>Be brief.<user+>{QUESTION}<assistant>")


def test_a_text_follows_a_system_message_and_replaces_no_image(tmp_path):
    config = config_of(tmp_path, {"prompt": TALK[:1]}, {})
    (prompt,) = load_prompts(config.data, TOKENIZER).prompts
    renderer = Renderer(TOKENIZER, config.data, True)
    text = TOKENIZER.decode(renderer.start("[S]F", prompt))
    assert text == "<system>Answer in hexadecimal.<user>[S]F<assistant>"
    prompt.messages.append({"role": "user", "content": [{"type": "image"}]})
    with pytest.raises(ValueError, match="the content of a message is a text, not .*image"):
        renderer.start("[S]F", prompt)


def test_a_row_has_the_whole_conversation(tmp_path):
    for row, data, expected in (
        ({"prompt": TALK}, {}, TALK),
        ({"prompt": QUESTION}, {"system_prompt": TALK[0]["content"]}, [TALK[0], TALK[-1]]),
        ({"prompt": QUESTION}, {"chat_template": False}, TALK[-1:]),
    ):
        config = config_of(tmp_path, row, {}, **data)
        section = config.data.model_copy(update=data)
        (prompt,) = load_prompts(section, TOKENIZER).prompts
        seen = RolloutTask(prompt, hash, None, 1, str).row
        assert (seen["prompt"], seen["messages"]) == (QUESTION, expected)


def test_the_handbooks_program_reads_the_whole_conversation(tmp_path):
    (code,) = re.findall(r"```python\n(# agent.py\n.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.DOTALL)
    (tmp_path / "agent.py").write_text(code)
    agent = {"function": f"{tmp_path / 'agent.py'}:guess", "workers": 1}
    prompt, (text,) = played(config_of(tmp_path, {"prompt": TALK}, {"agent": agent}), "1a")
    assert text == prompt.text and "hexadecimal" in text


def test_a_program_gets_the_rows_tools(tmp_path):
    (tmp_path / "agent.py").write_text(
        "import json, sys\nfrom openai import OpenAI\n"
        "row, client = json.loads(sys.stdin.readline()), OpenAI(max_retries=0)\n"
        "given = {name: row[name] for name in ('messages', 'tools')}\n"
        "client.chat.completions.create(model='x', **given)\nprint(1)\n"
    )
    agent = {"command": [sys.executable, str(tmp_path / "agent.py")], "workers": 1}
    row = {"prompt": TALK, "tools": [TOOL]}
    config = config_of(tmp_path, row, {"agent": agent}, tools_key="tools")
    prompt, (text,) = played(config, "1a")
    assert text == prompt.text and '"add"' in text


@pytest.fixture
def trls(tmp_path) -> str:
    """A reward function as TRL calls it: 1 for the whole conversation and the answer's message."""
    (tmp_path / "trls.py").write_text(
        f"def reward(prompts, completions, **columns):\n    return [float(prompts == [{TALK}]"
        " and completions == [[{'role': 'assistant', 'content': '1a'}]])]\n"
    )
    return f"{tmp_path / 'trls.py'}:reward"


def test_a_reward_function_of_trl_gets_the_whole_conversation(trls, tmp_path):
    (prompt,) = load_prompts(config_of(tmp_path, {"prompt": TALK}, {}).data, TOKENIZER).prompts
    with RewardPool(RewardConfig(grader=trls, workers=1)) as rewards:
        assert rewards.submit(prompt, "1a").result(timeout=60).value == 1.0
    row = RolloutTask(prompt, hash, None, 1, str).row
    assert answer_grader(trls, row)("1a") == 1.0, "of an environment's answer, too"


def test_a_transcript_has_roles_and_calls_of_tools_if_there_are_several_messages():
    prompt = Prompt(0, "a text", (1,), "")
    assert prompt.transcript == "a text"
    assert replace(prompt, messages=TALK[-1:]).transcript == QUESTION
    assert replace(prompt, messages=TALK).transcript == (
        f"system: Answer in hexadecimal.\n\nuser: Let x be 20.\n\nassistant: Noted.\n\nuser: {QUESTION}"
    )
    image = {"role": "user", "content": [{"type": "text", "text": "Is "}, {"type": "image"}]}
    calls, seen = replace(prompt, messages=[TOOL_USED[2], image]).transcript.split("\n\n")
    assert (calls, seen) == (f"assistant: \n{json.dumps(CALL)}", "user: Is <image>")
