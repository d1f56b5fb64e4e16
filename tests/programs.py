"""Agent programs of tests: a guessing game over plain openai, one that forks and compacts, and bad ones.

Imports are late: a process of the bad ones starts in half a second less than openai's import takes.
"""

import asyncio
import http.client
import json
import os
import sys
import time
from urllib.parse import urlsplit

from tests.games import GuessTheNumber


async def guess(base_url: str, key: str, row: dict, hint: str = "HL") -> dict:
    """The same game as games.GuessTheNumber plays."""
    from openai import AsyncOpenAI

    game, rewards, messages = GuessTheNumber(row, row["seed"], hint), [], list(row["messages"])
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        while True:
            answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
            said, reward, done = await game.step(answer.content)
            rewards.append(reward)
            if done:
                return {"reward": sum(rewards), "turn_rewards": rewards, "info": {"guesses": len(rewards)}}
            messages += [answer, {"role": "user", "content": said}]


def guess_behind_a_decorator(**arguments):
    """The same as a tracing library wraps it: no async function, which returns a coroutine."""
    return guess(**arguments)


def guess_in_a_thread(base_url: str, key: str, row: dict) -> float:
    """The same with the client that blocks, and streams."""
    from openai import OpenAI

    goal, messages = row["answer"], list(row["messages"])
    client = OpenAI(base_url=base_url, api_key=key, max_retries=0)
    for _ in range(10):
        pieces = list(client.chat.completions.create(model="policy", messages=messages, stream=True))
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        if text == goal:
            return 1.0
        hint = "L" if int(text) > int(goal) else "H"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    return 0.0


def hang_or_talk(base_url: str, key: str, row: dict) -> float:
    """Never returns, or says one thing."""
    if row["answer"] == "hang":
        time.sleep(3600)
    status, _ = call(base_url, "chat/completions", key, {"messages": row["messages"]}, timeout=200)
    return float(status == 200)


def call(url: str, path: str, key: str | None, body: object = None, timeout: float = 20) -> tuple[int, dict]:
    """(status, JSON) of a GET, or of a POST with a body: an object, or bytes as they are."""
    where = urlsplit(f"{url}/{path}")
    connection = http.client.HTTPConnection(where.netloc, timeout=timeout)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        connection.request("GET" if body is None else "POST", where.path, data, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")
    finally:
        connection.close()


def scripted(base_url: str, key: str, row: dict) -> float:
    """Does what the row's answer says: a list of [number of messages so far that are kept, text]; 0 begins anew.

    Of several texts each is a tool's output. Its reward follows from the number of tokens that were sampled.
    """
    messages: list = []
    sampled = 0
    for kept, said in json.loads(row["answer"]):
        new = [{"role": "user", "content": said}] if isinstance(said, str) else []
        new += [{"role": "tool", "content": text} for text in said if isinstance(said, list)]
        messages = [*messages[:kept], *new]
        status, answer = call(base_url, "chat/completions", key, {"messages": messages})
        if status != 200:
            raise RuntimeError(answer["error"]["message"])
        messages.append(answer["choices"][0]["message"])
        sampled += answer["usage"]["completion_tokens"]
    return sampled % 7 / 6


async def bad(base_url: str, key: str, row: dict):
    """Fails as the row's answer says, after a turn."""

    async def say(*texts: str, timeout: float = 20, **more) -> int:
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
        asked = {"messages": messages} | more
        return (await asyncio.to_thread(call, base_url, "chat/completions", key, asked, timeout))[0]

    await say("?")
    match row["answer"]:
        case "raise":
            raise RuntimeError("the tool server is gone")
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit("no browser")
        case "hang":
            await asyncio.sleep(3600)
        case "block":
            await asyncio.sleep(2)  # else others that wait in the process would reach their limit
            time.sleep(3600)
        case "hold":
            time.sleep(3600)
        case "slow":
            await asyncio.sleep(1)
        case "nothing":
            return None
        case "garbage":
            return {"reward": float("nan")}
        case "set":
            return {1, 2}
        case "many":
            return {"turn_rewards": [0.5, 0.5]}
        case "parallel":
            return float(await asyncio.gather(*(say("?") for _ in range(3))) == [200] * 3)
        case "refused":
            return [await say("?") for _ in range(2)].count(400) / 2
        case "leave":
            try:
                await say("L", timeout=0.5)
            except TimeoutError:
                return 0.5
        case "patient":  # a tool that takes longer than servers commonly keep a connection that is idle
            where = urlsplit(base_url)
            connection = http.client.HTTPConnection(where.netloc, timeout=20)
            for pause in (6, 0):
                connection.request("GET", f"{where.path}/models")
                assert connection.getresponse().read()
                await asyncio.sleep(pause)
            return 1.0
        case "statuses":
            bodies = [{"messages": 5}, {"messages": []}, {"n": 2}, {"tool_choice": "required"}, {"tools": [{}]}]
            found = [await say("?", **body) for body in bodies]
            plain, other = base_url.replace(f"/e/{key}", ""), base_url.replace(key, "x" * 32)
            found.append(call(base_url, "chat/completions", key, b"{")[0])
            found += [call(url, "models", it)[0] for url, it in ((other, key), (plain, key), (base_url, None))]
            found.append(call(plain, "models", None)[0])
            return {"reward": 0.0, "info": json.dumps(found)}
    return 0.25
