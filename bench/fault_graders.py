"""Graders, an environment and an agent of the runs that bench/faults.py and bench/soak.py disturb: a
file beside them says when one is to hang."""

import random
import time
from pathlib import Path


def low_digits(text, answer):
    """The share of small digits; hangs once when a file asks for it."""
    asked = Path(__file__).with_name("hang_in_reward")
    if asked.exists():
        asked.unlink()
        time.sleep(3600)
    return sum(c in "01234" for c in text) / max(len(text), 1)


def late_low_digits(text, answer):
    """The same after a random time."""
    time.sleep(random.uniform(0.0, 0.2))
    return low_digits(text, answer)


class LowDigits:
    """An environment of two turns, rewarded as the grader would."""

    def __init__(self, row, seed):
        self.turns = 0

    def reset(self):
        return None

    def step(self, text):
        self.turns += 1
        return "0+0=", low_digits(text, None) / 2, self.turns == 2


async def low_digits_agent(base_url, key, row):
    """An agent of two turns with the same rewards."""
    from openai import AsyncOpenAI, BadRequestError

    messages = list(row["messages"])
    reward = 0.0
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        for _ in range(2):
            try:
                answer = await client.chat.completions.create(model="policy", messages=messages)
            except BadRequestError:  # no room for another turn
                break
            said = answer.choices[0].message
            reward += low_digits(said.content or "", None) / 2
            messages += [said, {"role": "user", "content": "0+0="}]
    return {"reward": reward}
