"""Environments of tests: a number to be guessed, a walk whose turns see the present place alone, and bad ones."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megagrpo.rollout.agents import Unavailable, UnusableRow


class GuessTheNumber:
    """The model says a digit; told H(igher) or L(ower), until it is right."""

    def __init__(self, row: dict, seed: int, hint: str = "HL"):
        self.goal, self.hint = int(row["answer"]), hint

    def reset(self) -> None:
        return None

    async def step(self, text: str):
        await asyncio.sleep(0)
        if not text.isdigit():
            return "?", 0.0, False  # a bad message is answered, it is no error
        if int(text) == self.goal:
            return None, 1.0, True
        return self.hint[int(text) > self.goal], 0.0, False

    def close(self) -> None: ...


class Walk:
    """From 0 to 3 by "+"; each turn sees its place alone, "-" ends it. A step is worth a quarter."""

    def __init__(self, row: dict, seed: int):
        self.place = 0

    def reset(self) -> str:
        return "0:"

    def step(self, text: str):
        if text == "-":
            return None, 0.0, True
        self.place += 1
        return f"{self.place}:", 0.25, self.place == 3


class SaysOneThing:
    """Says one thing to a turn that ends with a call; any other turn is the last."""

    def __init__(self, row: dict, seed: int, call: str, says: str):
        self.call, self.says = call, says

    def reset(self) -> None: ...

    def step(self, text: str):
        called = text.endswith(self.call)
        return (self.says, 0.0, False) if called else (None, 0.0, True)


class SaysOneOnce:
    """Says 1 to the first turn; the second is the last."""

    def __init__(self, row: dict, seed: int):
        self.turns = 0

    def reset(self) -> None: ...

    def step(self, text: str):
        self.turns += 1
        return "1", 0.0, self.turns == 2


class Broken:
    """Its first answer raises."""

    def __init__(self, row: dict, seed: int): ...

    def reset(self) -> None: ...

    def step(self, text: str):
        raise KeyError("on purpose")


class Bad:
    """Raises, hangs, dies or returns nonsense, as the row's answer says."""

    def __init__(self, row: dict, seed: int):
        self.kind = row["answer"]
        if self.kind == "make":
            raise KeyError("no such task")

    def reset(self) -> object:
        return {"reset": 5, "nothing": "", "long": 1025 * "3"}.get(self.kind)

    def step(self, text: str) -> object:
        match self.kind:
            case "raise":
                raise RuntimeError("the tool server is gone")
            case "hang":
                time.sleep(3600)
            case "die":
                os._exit(3)
            case "fork":
                subprocess.Popen(["sleep", "3600"])
                time.sleep(3600)
            case "garbage":
                os.write(int(sys.argv[1]), b"\x00 no JSON\n")
            case "other answer":
                os.write(int(sys.argv[1]), b'[0, [[null, 1.0, true], null, ""], null]\n')
            case "slow":
                time.sleep(1)
                return None, 0.5, True
            case "strange":
                return "x y", 0.0, False
            case "content":
                return [{"role": "user", "content": 5}], 0.0, False
            case "flood":
                return 2**20 * "3", 0.0, False
            case "nan":
                return None, float("nan"), True
            case "pair":
                return None, True
        return None, 1.0, True


class Slow:
    """Answers after 1.2 s and is never done."""

    def __init__(self, row: dict, seed: int): ...

    def reset(self) -> None: ...

    def step(self, text: str):
        time.sleep(1.2)
        return "H", 0.25, False


class Flaky:
    """Fails as the row's answer says until it was begun so often; every begin is a line of a file."""

    def __init__(self, row: dict, seed: int, file: str, good: int):
        with Path(file).open("a") as log:
            log.write(f"{os.getpid()} {seed}\n")
        self.kind, self.bad = row["answer"], len(Path(file).read_text().splitlines()) < good

    def reset(self) -> None: ...

    def step(self, text: str):
        if self.bad:
            match self.kind:
                case "unavailable":
                    raise Unavailable("no free sandbox")
                case "connection":
                    raise ConnectionRefusedError("the tool server is gone")
                case "unusable":
                    raise UnusableRow("the row has no test")
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
        return None, 1.0, True


class Sums:
    """Three sums; each answer is worth the share of its small digits, which a random model gets in part."""

    def __init__(self, row: dict, seed: int):
        self.turn = 0

    def reset(self) -> None:
        return None

    def step(self, text: str):
        self.turn += 1
        reward = sum(c in "01234" for c in text) / max(len(text), 1)
        return f"{self.turn}+{len(text) % 10}=", reward, self.turn == 3


class Opens:
    """Begins with words of its own, or with the row's conversation and a message more; the second turn is the last."""

    def __init__(self, row: dict, seed: int, whole: bool = False):
        self.row, self.whole, self.turns = row, whole, 0

    def reset(self) -> object:
        more = {"role": "user", "content": "More?"}
        return [*self.row["messages"][1:], more] if self.whole else "Map: " + self.row["prompt"]

    def step(self, text: str):
        self.turns += 1
        return "on", 0.0, self.turns == 2
