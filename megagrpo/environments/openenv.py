"""The environment `openenv`: a session on an OpenEnv server. Users install the websockets
client."""

import json
from collections.abc import Mapping
from contextlib import suppress

from megagrpo.rollout.agents import Unavailable


class OpenEnv:
    """A session with {"type": "reset" | "step" | "close", "data": ...} on `url`, such as
    ws://host:8000/ws.

    action: the field of an action that gets a turn of the model. observation: the field that the
    model sees; default: all, as JSON. `reset` gets the seed and a row's `extra`. timeout_s: the
    limit for an answer. Protocol: openenv-core 0.3.0.
    """

    def __init__(
        self,
        row: Mapping[str, dict],
        seed: int,
        url: str,
        action: str = "message",
        observation: str = "",
        timeout_s: float = 20.0,
    ):
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        self._lost = (WebSocketException, OSError)
        self._reset = {"seed": seed % 2**31, **row["extra"]}
        self._action = action
        self._observation = observation
        self._timeout_s = timeout_s
        self._has_reward = False  # of any step
        try:
            self._socket = connect(url, open_timeout=timeout_s, max_size=None)
        except self._lost as exc:
            raise Unavailable(f"{url}: {exc}") from exc

    def reset(self) -> str | None:
        """Returns the first observation; None, for the prompt of the data, if it is empty."""
        return self._text(self._answer("reset", self._reset)) or None

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Returns the observation after an action, its reward (0 if it has none), and whether it
        was the last. Raises RuntimeError if no step of an episode had a reward."""
        answer = self._answer("step", {self._action: text})
        done = bool(answer.get("done"))
        self._has_reward |= answer.get("reward") is not None
        if done and not self._has_reward:
            raise RuntimeError("the server ended the episode without a reward in any step")
        return None if done else self._text(answer), float(answer.get("reward") or 0.0), done

    def close(self) -> None:
        """Ends the session."""
        with self._socket, suppress(*self._lost):  # the server may have ended it
            self._socket.send(json.dumps({"type": "close"}))

    def _answer(self, kind: str, data: Mapping[str, object]) -> dict:
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv(self._timeout_s))
        except self._lost as exc:
            raise Unavailable(f"{kind}: {type(exc).__name__}: {exc}") from exc
        if answer["type"] == "error":
            words = f"{kind}: {answer['data'].get('code')}: {answer['data'].get('message')}"
            # sessions of others will end
            raise (Unavailable if ": CAPACITY_REACHED:" in words else RuntimeError)(words)
        return answer["data"]

    def _text(self, answer: dict) -> str:
        observation = answer.get("observation") or {}
        if self._observation:
            observation = observation.get(self._observation)
        if isinstance(observation, str):
            return observation
        is_empty = observation is None or observation == {}
        return "" if is_empty else json.dumps(observation, ensure_ascii=False)
