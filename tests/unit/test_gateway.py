"""Requests that cannot be rendered as they are, over the real gateway's HTTP."""

import asyncio

import pytest
from test_conversation import DATA, TEMPLATE, TOOLS, USER, talk

from examples.laptop.model import character_tokenizer
from megagrpo.rollout.agents.gateway import Gateway
from megagrpo.rollout.agents.renderer import Renderer
from tests.programs import call as post


def test_half_a_character_in_a_request_is_replaced():
    """JavaScript and Python write one as an escape, of a text that was cut inside a character."""
    tokenizer = character_tokenizer("0123456789?+= adelmnorstuiy<>|\n\ufffd")
    tokenizer.chat_template = TEMPLATE
    body = b'{"messages": [{"role": "user", "content": "?\\ud83d"}]}'

    async def run() -> tuple[tuple[int, dict], tuple[int, dict], list[list[int]]]:
        gateway, (conversation, contexts) = Gateway("127.0.0.1", "policy"), talk("1")
        conversation._renderer = Renderer(tokenizer, DATA, True)
        gateway.start()
        with gateway.session(conversation) as (url, key):
            deep = await asyncio.to_thread(post, url, "chat/completions", key, b"[" * 10**6)
            return await asyncio.to_thread(post, url, "chat/completions", key, body), deep, contexts

    (status, answer), (refused, _), [context] = asyncio.run(run())
    assert status == 200 and tokenizer.decode(context) == "<user>?\ufffd\n<assistant>", answer
    assert refused == 400


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_a_message_or_tools_that_the_template_leaves_out_are_refused(path):
    known = TEMPLATE.replace("{% if tools %}<tools>{{ tools | length }}\n{% endif %}", "").replace(
        "{% for m in messages %}", "{% for m in messages if m['role'] in ('user', 'assistant') %}"
    )
    tokenizer = character_tokenizer("0123456789?+= adelmnorstuiy<>|\n")
    tokenizer.chat_template = known
    tool = TOOLS[0] if path == "chat/completions" else {"name": "add", "input_schema": {}}
    other = {"role": "developer", "content": "see"}
    bodies = [{"messages": [other, USER]}, {"messages": [USER], "tools": [tool]}, {"messages": [USER]}]

    async def run() -> list[tuple[int, dict]]:
        gateway, (conversation, _) = Gateway("127.0.0.1", "policy"), talk("1")
        conversation._renderer = Renderer(tokenizer, DATA, True)
        gateway.start()
        with gateway.session(conversation) as (url, key):
            said = [await asyncio.to_thread(post, url, path, key, body) for body in bodies]
            (turn,) = conversation._turns
            with pytest.raises(ValueError, match="leaves out the message of the role 'developer'"):
                await conversation.say([USER, turn.message, other])
            return said

    (lost, lost_said), (without, without_said), (good, _) = asyncio.run(run())
    assert (lost, without, good) == (400, 400, 200)
    assert "it leaves out the message of the role 'developer'" in lost_said["error"]["message"]
    assert "it leaves out the tools" in without_said["error"]["message"]
