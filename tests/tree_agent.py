"""An agent program over plain HTTP whose rollouts are trees: it goes on, forks and begins anew from a summary."""

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path


def tree(base_url: str, key: str, row: dict, marks: str = "", pause_s: float = 0.0) -> dict:
    """Two turns, the second one twice, a third after the fork, and a summary. Its note: the number of sampled tokens.

    Its reward, the share of small digits in all answers, is what a random model gets in part; limits end it early.
    marks: a file that gets a line before the third turn, its process. pause_s: before each turn after the first.
    """
    texts, sampled = [], 0

    def say(*messages: dict) -> dict:
        nonlocal sampled
        time.sleep(pause_s if texts else 0.0)
        if marks and len(texts) == 2:
            with Path(marks).open("a") as file:
                file.write(f"{os.getpid()}\n")
        data, headers = (json.dumps({"messages": messages}).encode(), {"Content-Type": "application/json"})
        request = urllib.request.Request(f"{base_url}/chat/completions", data, headers)
        with urllib.request.urlopen(request, timeout=400) as answer:
            found = json.load(answer)
        sampled += found["usage"]["completion_tokens"]
        texts.append(found["choices"][0]["message"]["content"])
        return found["choices"][0]["message"]

    def user(text: str) -> dict:
        return {"role": "user", "content": text}

    history = list(row["messages"])
    try:
        history.append(say(*history))
        say(*history, user("1+2="))
        history += [user("3+4="), say(*history, user("3+4="))]
        say(*history, user("5+6="))
        say(user(f"{len(texts)}+1="))
    except urllib.error.HTTPError as exc:
        if exc.code != 400:
            raise
    said = "".join(texts)
    return {"reward": sum(c in "01234" for c in said) / max(len(said), 1), "info": sampled}
