"""What `verifiers_episodes.py` needs of the classic interface of verifiers 0.2.0, for a game of guesses."""

import asyncio
import json
import os
from types import SimpleNamespace
from urllib.request import Request, urlopen

import numpy as np

ClientConfig = SimpleNamespace


class _Environment:
    def get_dataset(self):
        return [{"prompt": [{"role": "user", "content": "?"}], "answer": str(number)} for number in range(10)]

    async def run_rollout(self, row, client, model, sampling_args):
        print("what an environment prints is no answer")
        messages = list(row["prompt"])
        for _ in range(4):
            body = json.dumps({"model": model, "messages": messages}).encode()
            request = Request(f"{client.api_base_url}/chat/completions", body, {"Content-Type": "application/json"})
            with await asyncio.to_thread(urlopen, request) as answer:
                messages.append(json.load(answer)["choices"][0]["message"])
            match messages[-1]["content"]:
                case said if said == row["answer"]:
                    return {"reward": np.float32(1.0), "stop_condition": "over", "error": None}
                case "r":
                    os._exit(3)
                case "t":
                    await asyncio.sleep(3600)
                case "m" if row["answer"] == "8":
                    try:
                        await asyncio.sleep(3600)
                    finally:
                        await asyncio.sleep(3600)
                case "u":
                    return {"reward": None, "error": "ValueError: no number"}
            hint = "H" if messages[-1]["content"] < row["answer"] else "L"
            messages.append({"role": "user", "content": hint})
        return {"reward": 0.0, "stop_condition": "max_turns", "error": None}


def load_environment(name):
    """Returns the game, whatever the name."""
    return _Environment()
