"""Agent programs of test_gateway.py: the game of games.Sums over plain openai, and one whose history is a tree."""

from openai import AsyncOpenAI, BadRequestError

from tests.games import Sums


async def sums(base_url: str, key: str, row: dict) -> dict:
    """Plays games.Sums; its rewards so far count when a limit is met, as those of an environment do."""
    game, rewards, messages, done = Sums(row, row["seed"]), [], list(row["messages"]), False
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        while not done:
            try:
                answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0]
            except BadRequestError:
                break
            if answer.finish_reason == "length":
                break
            said, reward, done = game.step(answer.message.content)
            rewards.append(reward)
            messages += [answer.message, {"role": "user", "content": said}]
    return {"reward": sum(rewards)}


async def branches(base_url: str, key: str, row: dict) -> dict:
    """Two turns, the second one twice, and a summary that begins anew. Its note is the number of sampled tokens."""
    first, sampled = list(row["messages"]), 0
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:

        async def say(*messages) -> object:
            nonlocal sampled
            answer = await client.chat.completions.create(model="policy", messages=messages)
            sampled += answer.usage.completion_tokens
            return answer.choices[0].message

        answer = await say(*first)
        for text in ("1+2=", "3+4="):
            await say(*first, answer, {"role": "user", "content": text})
        await say({"role": "user", "content": "5+6="})
    return {"reward": 1.0, "info": sampled}
