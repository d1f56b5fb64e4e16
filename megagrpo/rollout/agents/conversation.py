"""A rollout as a tree of turns: messages that extend an earlier request continue the exact ids that
the model sampled.

A turn holds only the ids that it adds. A path from a first turn to a last one is a sample; a turn
that several paths share is trained on in the first path and is context in the others.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import numpy as np

from megagrpo.config.rollout import AgentConfig
from megagrpo.data.messages import Message, Tools, text_of
from megagrpo.rollout.agents.answering import RolloutTask, SamplePart
from megagrpo.rollout.agents.renderer import Renderer, in_time
from megagrpo.rollout.generation import GenerationFailed
from megagrpo.rollout.response import Response
from megagrpo.system.errors import explained
from megagrpo.types import Outcome

_CUT = "a turn reached the limit of tokens"
# (text, tools, prefix of the calls' ids) -> message
Parse = Callable[[str, Tools, str], Awaitable[Message]]


class Refused(ValueError):
    """Raised for a request that no turn can answer. code: "context_length_exceeded" |
    "invalid_request" and so on."""

    def __init__(self, code: str, text: str):
        super().__init__(text)
        self.code = code


@dataclass(eq=False)
class ChatTurn:
    """A turn of the model, and the messages before it."""

    before: "ChatTurn | None"  # the turn that it continues; None: it is a first one
    messages: tuple[bytes, ...]  # digests of the messages since then
    tools: bytes  # digest of the tools
    added: np.ndarray  # [T] int32, the ids of the messages; in a first turn the whole prompt
    num_tokens: int = 0  # of its path, this turn included
    num_responding: int = 0  # the same without the prompt
    number: int = 0  # turns begun before it
    response: Response = field(default_factory=lambda: SamplePart(None).response)
    message: Message = field(default_factory=dict)  # which the agent was sent
    # digests of the message without its reasoning, and of that
    answer: tuple[bytes, bytes] = (b"", b"")
    text: str = ""  # which the message was parsed from
    followers: list["ChatTurn"] = field(default_factory=list)
    num_begun: int = 0  # followers, those that are being sampled included

    def context(self) -> np.ndarray:
        """Returns the ids [T] int32 of its path."""
        return np.concatenate(
            [ids for turn in self.path() for ids in (turn.added, turn.response.token_ids)]
        )

    def take_back(self) -> None:
        """Stops counting a follower that was begun and has no end."""
        self.num_begun -= 1

    def path(self) -> list["ChatTurn"]:
        """Returns the turns from the first one to this one."""
        turn, path = self, [self]
        while turn.before is not None:
            turn = turn.before
            path.append(turn)
        return path[::-1]


class Conversation:
    """The requests of the agent of one rollout to the model, in any order. Coroutines run in one
    loop.

    parse: makes the message for the agent from the text of a turn.
    """

    def __init__(self, config: AgentConfig, renderer: Renderer, task: RolloutTask, parse: Parse):
        self._config, self._renderer, self._task, self._parse = config, renderer, task, parse
        self._root = ChatTurn(None, (), b"", np.zeros(0, np.int32))  # first turns follow it
        self._turns: list[ChatTurn] = []  # in the order of their ends
        self._num_begun = 0
        self._running: set[asyncio.Task[ChatTurn]] = set()
        self._since, self._waited_s = 0.0, 0.0
        self.closed = False
        self.stopped = ""  # by which limit the last request was refused, or its turn cut
        # the turn that the request would have continued, or that was cut
        self._stopped_at: ChatTurn | None = None
        # if the engines gave no sample
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def waited_s(self) -> float:
        """Returns the seconds in which engines were sampling turns."""
        if self._running:
            return self._waited_s + time.monotonic() - self._since
        return self._waited_s

    async def say(self, messages: Sequence[Message], tools: Tools = None) -> ChatTurn:
        """Returns the model's turn after these messages. Raises ValueError; GenerationFailed sets
        `failed` too.

        Cancelled, it leaves no turn: the agent has not seen it.
        """
        if self.closed:
            raise Refused("invalid_request", "the rollout is over")
        task = asyncio.create_task(self._next(messages, tools))
        if not self._running:
            self._since = time.monotonic()
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await task

    def close(self) -> None:
        """Ends the conversation, without the turns that are being sampled."""
        self.closed = True
        for task in self._running:
            task.cancel()
        self.failed.cancel()

    def samples(self) -> tuple[list[SamplePart], dict[int, int]]:
        """Returns the samples, and for each turn the index of its last token among the tokens of
        all responses."""
        parts = list[SamplePart]()
        ends = dict[int, int]()
        before = 0
        stopped_at = -1  # the last one, if no path ends there
        leaves = (turn for turn in self._turns if not turn.followers)
        for leaf in sorted(leaves, key=lambda turn: turn.number):
            first, *_ = path = leaf.path()
            part = SamplePart(None)
            if not np.array_equal(first.added, self._task.prompt.token_ids):
                part.prompt_ids = first.added
            for turn in path:
                if turn is not first:
                    part.add_context(turn.added)
                part.add(turn.response, sampled=turn.number not in ends)
                if turn.number in ends:
                    part.shared = len(part.response.token_ids)
                ends.setdefault(turn.number, before + len(part.response.token_ids) - 1)
            if leaf is self._stopped_at:
                stopped_at = len(parts)
            parts.append(part)
            before += len(part.response.token_ids)
        if self.stopped and parts:
            parts[stopped_at].response = replace(parts[stopped_at].response, finish_reason="length")
        return parts or [SamplePart(None)], ends

    def outcome(
        self, reward: float, turn_rewards: Sequence[float] | None, note: str, by_turn: bool
    ) -> Outcome:
        """Returns the outcome of a rollout. turn_rewards: those of the turns in the order in which
        they began.

        by_turn: each belongs to the last token of its turn. More rewards than turns are an error.
        """
        ends = self.samples()[1]
        if turn_rewards and len(turn_rewards) > len(ends):
            detail = f"it returned {len(turn_rewards)} turn_rewards for {len(ends)} turns"
            return Outcome("error", detail=detail)
        pairs = zip(sorted(ends), turn_rewards or (), strict=False)
        rewards = sorted((ends[number], share) for number, share in pairs if share and by_turn)
        detail = "; ".join(filter(None, (self.stopped, note)))
        return Outcome("score", reward, detail, token_rewards=tuple(rewards))

    def _ended(self, task: "asyncio.Task[ChatTurn]") -> None:
        self._running.discard(task)
        if not self._running:
            self._waited_s += time.monotonic() - self._since
        if task.cancelled() or self.failed.done():
            return
        exc = task.exception()
        if isinstance(exc, GenerationFailed):
            self.failed.set_exception(exc)

    async def _next(self, messages: Sequence[Message], tools: Tools) -> ChatTurn:
        turn = await self._begun(messages, tools)
        parent, room = turn.before or self._root, self._task.max_tokens - turn.num_responding
        if room <= 0:
            raise self._limited("context_length_exceeded", "no room for another turn", turn.before)
        if self._num_begun >= self._config.max_turns:
            raise self._limited("max_turns", f"{self._config.max_turns} turns", turn.before)
        turn.number, self._num_begun = self._num_begun, self._num_begun + 1
        parent.num_begun += 1
        with ExitStack() as unfinished:
            unfinished.callback(parent.take_back)
            known = max(0, parent.num_tokens - 1)
            turn.response = await self._task.turn(turn.number, turn.context(), room, known)
            turn.text = self._task.decode(turn.response.token_ids)
            # a client that goes must not end the process of other turns
            turn.message = await asyncio.shield(self._message(turn, tools))
            unfinished.pop_all()
        turn.num_tokens += len(turn.response.token_ids)
        turn.num_responding += len(turn.response.token_ids)
        turn.answer = _digests(turn.message)
        self.stopped, self._stopped_at = "", turn
        if turn.response.finish_reason != "stop":
            self.stopped = _CUT
        parent.followers.append(turn)
        self._turns.append(turn)
        return turn

    async def _message(self, turn: ChatTurn, tools: Tools) -> Message:
        """Returns the message of a turn. Calls inside its reasoning are text, or commands none, and so
        are those of a turn that was cut: parser qwen3_coder completes the last one."""
        if turn.response.finish_reason != "stop":
            tools = None
        prompt, end = self._task.prompt, self._renderer.reasoning_end
        ids = f"c{turn.number:05}"
        if self._config.reasoning_parser:  # which sees the tag that began it here only
            begun = prompt.reasoning_begun(end)
            message = await self._parse(begun + turn.text, tools, ids)
            return message | {"content": message["content"].removeprefix(begun)}
        answer = prompt.answer_in(turn.text, end)
        message = await self._parse(answer, tools, ids)
        before = turn.text.removesuffix(answer)
        if self._config.function == "harbor":  # as a built-in environment; verifiers has parsers
            return message | {"reasoning_content": before}
        return message | {"content": before + message["content"]}

    async def _begun(self, messages: Sequence[Message], tools: Tools) -> ChatTurn:
        """Returns the turn that answers the messages, before it is sampled."""
        if not messages or messages[-1].get("role") == "assistant":
            raise Refused(
                "invalid_request", "the last message is the model's own: say something to it"
            )
        with explained("messages or tools cannot be read"):
            digests = list(map(_digests, messages))
            tools_digest = _digest(tools or [])
        for tool in (self._config.tool_parser and tools) or ():
            with explained(f"SGLang's parsers read functions; leave out the tool {tool!r:.200}"):
                str(tool["function"]["name"])
        before, number = self._extended(digests, tools_digest)
        if any(message.get("role") == "assistant" for message in messages[number:]):
            before, number = None, 0  # some turn was edited, or the model did not write it
        new = messages[number:]
        with explained("messages or tools cannot be rendered"):
            if before is None:
                ids = await in_time(self._renderer.begin, new, tools)
            else:
                room = self._task.max_tokens - before.num_responding
                follow = (before.response.token_ids, tools, room)
                ids = await in_time(self._renderer.after_turn, new, *follow)
        new_digests = tuple(visible for visible, _ in digests[number:])
        parent = before or self._root
        if parent.num_begun and self._config.fork == "refuse":
            raise Refused(
                "fork", "these messages do not extend the last turn (sampling.agent.fork: refuse)"
            )
        if before is None:
            longest = self._renderer.max_prompt_tokens
            if len(ids) > longest:
                text = f"more tokens than data.max_prompt_tokens {longest}"
                raise self._limited("context_length_exceeded", text, None)
            return ChatTurn(None, new_digests, tools_digest, ids, num_tokens=len(ids))
        total, responding = before.num_tokens + len(ids), before.num_responding + len(ids)
        if before.response.finish_reason != "stop":
            raise self._limited("context_length_exceeded", _CUT, before)
        return ChatTurn(before, new_digests, tools_digest, ids, total, responding)

    def _extended(
        self, digests: list[tuple[bytes, bytes]], tools: bytes
    ) -> tuple[ChatTurn | None, int]:
        """Returns the last turn that messages with these digests extend, and the number of messages
        up to it.

        None: there is no such turn, or several fit and differ.
        """
        matches: list[tuple[int, ChatTurn]] = []
        todo = [
            (0, turn)
            for turn in self._root.followers
            if turn.tools == tools and self._config.history == "all"
        ]
        while todo:
            start, turn = todo.pop()
            end = start + len(turn.messages)
            same = tuple(visible for visible, _ in digests[start:end]) == turn.messages
            if not same or end >= len(digests):
                continue
            visible, reasoning = digests[end]
            # many agents drop the reasoning
            if visible == turn.answer[0] and reasoning in (turn.answer[1], _NOTHING):
                matches.append((end + 1, turn))
                todo += [(end + 1, follower) for follower in turn.followers]
        number = max((number for number, _ in matches), default=0)
        last = [turn for end, turn in matches if end == number]
        if len({turn.context().tobytes() for turn in last}) != 1:
            return None, 0
        return min(last, key=lambda turn: turn.num_begun), number

    def _limited(self, code: str, reason: str, after: ChatTurn | None) -> Refused:
        self.stopped, self._stopped_at = reason, after
        return Refused(code, f"this rollout has a limit: {reason}")


def _digest(value: object) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()


_NOTHING = _digest("")


def _digests(message: Message) -> tuple[bytes, bytes]:
    """Returns digests of a message without its reasoning, in canonical JSON, and of the
    reasoning."""
    calls = []
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
        # A text that is not JSON stays a text. All numbers are floats: clients in JavaScript write
        # 1 for 1.0 and round large ones.
        with suppress(ValueError, RecursionError):
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            arguments = json.dumps(json.loads(text, parse_int=float), sort_keys=True)
        calls.append([call.get("id"), name, arguments])
    role, call_id, name = (message.get(key) for key in ("role", "tool_call_id", "name"))
    visible = [role, text_of(message), calls, call_id, name]
    return _digest(visible), _digest(message.get("reasoning_content") or "")
