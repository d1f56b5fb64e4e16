"""Main program of an engine: SGLang's server, with the API key from the environment.

On a command line every user of the machine could read the key, and SGLang logs its arguments. The
processes that SGLang starts import this file again, so their logs do not show the key either.
"""

import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from megagrpo.system import environment
from megagrpo.system.processes import lasting_imports

_PR_SET_PDEATHSIG = 1
# SGLang imports them where they are installed: for dumps of Megatron's ranks, and for tools of its
# own. That takes two seconds, and with Megatron comes Transformer Engine.
_UNUSED = ("megatron", "mcp")
_KEY = environment.get(environment.API_KEY) or ""
_make_record = logging.getLogRecordFactory()


def _without_key(*args, **kwargs) -> logging.LogRecord:
    record = _make_record(*args, **kwargs)
    try:
        text = record.getMessage()
    # a wrong format string: logging would print an error and the arguments
    except (TypeError, ValueError, KeyError):
        text = f"{record.msg} {record.args}"
    if _KEY in text:
        record.msg = text.replace(_KEY, "(the API key)")
        record.args = ()
    return record


if _KEY:
    logging.setLogRecordFactory(_without_key)


@dataclass(frozen=True)
class _Candidates:
    """Tokens to score at the positions of a request, k at each, in the part that a forward
    reads."""

    ids: Sequence[int]  # k after k, for all positions with log-probabilities
    k: int
    first: int  # the first of these positions in the part

    def __len__(self) -> int:
        return 0  # SGLang would score as many again for the position after the last

    def at(self, position: int) -> Sequence[int]:
        """Returns the tokens of a position of the part; any after the last, which are dropped."""
        begin = (self.first + position) * self.k
        return self.ids[begin : begin + self.k] or self.ids[: self.k]


def _prepare_scores() -> None:
    """Makes a teacher's engine score at the temperature of samples, and read token_ids_logprob as k
    tokens for each position.

    SGLang 0.5.21 scores input at temperature 1, and the same tokens at all positions. Called in
    every process that SGLang starts, by a spawn or before a fork.
    """
    temperature = float(environment.get(environment.SCORES_AT, 0))
    if not temperature:
        return
    import torch
    from sglang.srt.layers import logprob_processor
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    logits_of = LogitsProcessor._get_logits
    prepare_batch = ScheduleBatch.prepare_for_extend
    gather_chunk = logprob_processor.get_token_ids_logprobs_chunk

    def scaled(self, *args, **kwargs):
        return logits_of(self, *args, **kwargs).div_(temperature)

    def prepared(batch, *args, **kwargs):
        prepare_batch(batch, *args, **kwargs)
        parts = zip(batch.reqs, batch.prefix_lens, batch.extend_logprob_start_lens, strict=True)
        if batch.token_ids_logprobs is not None:
            batch.token_ids_logprobs = [_candidates(*part) for part in parts]

    def by_position(logprobs, candidates, lengths, values, ids, begun=0, **kwargs):
        """begun: positions of the first request that were in earlier chunks."""
        k = max((part.k for part in candidates if part is not None), default=1)
        rows = []
        for number, (part, length) in enumerate(zip(candidates, lengths, strict=True)):
            positions = range(0 if number else begun, length)
            rows += [[0] * k if part is None else part.at(i) for i in positions]
        columns = torch.tensor(rows[: len(logprobs)], device=logprobs.device)
        asked = [None if part is None else list(range(k)) for part in candidates]
        return gather_chunk(
            logprobs.gather(1, columns), asked, lengths, values, ids, begun, **kwargs
        )

    LogitsProcessor._get_logits = scaled
    ScheduleBatch.prepare_for_extend = prepared
    logprob_processor.get_token_ids_logprobs_chunk = by_position


def _candidates(request, num_cached, start) -> _Candidates | None:
    """Returns the candidates in the part of a request after `num_cached` tokens; start: where its
    log-probabilities begin in the part."""
    ids = request.logprob.token_ids_logprob
    if ids is None or request.logprob_start_len < 0:  # SGLang makes another of one that is too long
        return None
    positions = len(request.origin_input_ids) - 1 - request.logprob_start_len
    return _Candidates(ids, len(ids) // positions, num_cached + start - request.logprob_start_len)


def _draw_apart() -> None:
    """Makes the replicas of attention by data draw different random numbers. Called as
    `_prepare_scores`, before load_plugins.

    SGLang 0.5.21 seeds all ranks alike, and replicas step together: each would give the same
    response to a prompt. The ranks of one replica must draw the same.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import get_parallel

    def shifted(seed: int) -> tuple[tuple[int], dict]:
        return (seed + get_parallel().attn_dp_rank,), {}

    HookRegistry.register("sglang.srt.managers.scheduler.set_random_seed", shifted, HookType.BEFORE)


def _answer_packed() -> None:
    """Makes /generate answer a client that accepts it in the packed form of answer_arrays.py.

    SGLang 0.5.21 makes JSON of each answer: 44 bytes a token, which take the trainers' leaders more
    time than all the rest of a step.
    """
    from fastapi import Response
    from sglang.srt.entrypoints import http_server

    from megagrpo.rollout.answer_arrays import PACKED, pack_answer

    accepted = ContextVar("accepted", default=False)
    as_json = http_server.orjson_response

    class Accepting:
        def __init__(self, app):
            self.app = app

        async def __call__(self, scope, receive, send):
            wanted = dict(scope.get("headers", ())).get(b"accept", b"")
            accepted.set(PACKED.encode() in wanted)
            await self.app(scope, receive, send)

    def answer(content, *args, **kwargs):
        if accepted.get() and isinstance(content, dict):
            return Response(pack_answer(content), media_type=PACKED)
        return as_json(content, *args, **kwargs)

    http_server.orjson_response = answer
    http_server.app.add_middleware(Accepting)


def _hide_unused() -> None:
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(_UNUSED))


if __name__ == "__mp_main__":
    # SGLang ties its processes to the server too, but only after long imports: killed before, it
    # left orphans.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)
    _hide_unused()
    _draw_apart()
    _prepare_scores()


if __name__ == "__main__":
    _hide_unused()
    with lasting_imports():
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

        from megagrpo.rollout.service.engine_words import engine_words

        _draw_apart()
        load_plugins()
        words = [*engine_words(json.loads(sys.argv[1])), *sys.argv[2:]]
        arguments = prepare_server_args(words + [f"--api-key={_KEY}"] * bool(_KEY))
        _prepare_scores()
        _answer_packed()
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
