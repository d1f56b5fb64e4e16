"""The process that parses turns of the model with SGLang's parsers: `python -m
megagrpo.rollout.service.parser_worker FD TOOL_PARSER REASONING_PARSER`.

Some parsers need quadratic time for a degenerate turn; in an engine they would hold up requests and
the health check. Written against sglang 0.5.21.
"""

import logging
import re
import signal
import sys
from collections.abc import Sequence

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

from megagrpo.data.rows import well_formed
from megagrpo.system.worker_process import answer_calls

# Kimi-K2 names its calls itself, and its template repeats the name before a tool's output.
_MODEL_IDS = re.compile(r"functions\.[\w.-]{1,128}:\d{1,9}(?=\s*<\|tool_call_argument_begin\|>)")
_CPU_S = 2.0  # for a turn; a good one of 1 MB takes 0.06


def parse(
    text: str, functions: Sequence[dict], prefix: str, tool_parser: str, reasoning_parser: str
) -> dict[str, object]:
    """Returns the parts of a turn's message that an engine's endpoints would return. prefix: how
    the ids of calls begin. An empty name: no such parser.

    Raises ValueError for an unknown parser, and the parsers' exceptions.
    """
    message: dict[str, object] = {}
    if reasoning_parser:
        reasoning, rest = ReasoningParser(reasoning_parser).parse_non_stream(text)
        if reasoning or len(rest or "") < len(text):  # of an empty one only the tags are gone
            text = rest or ""
            message = {"content": text, "reasoning_content": reasoning}
    if tool_parser:
        tools = [Tool(function=function) for function in functions]
        content, parsed = FunctionCallParser(tools, tool_parser).parse_non_stream(text)
        ids = _MODEL_IDS.findall(text)
        if not len(set(ids)) == len(ids) == len(parsed):
            ids = [f"{prefix}{index:03}" for index in range(len(parsed))]
        calls = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": well_formed(call.parameters)},
            }
            for call_id, call in zip(ids, parsed, strict=True)
        ]
        if calls:
            message |= {"content": content or "", "tool_calls": calls}
    return message


def main(fd: int, *parsers: str) -> None:
    """Answers calls [text, functions, prefix] until the socket is closed. Raises ValueError for an
    unknown parser."""
    parse("", (), "", *parsers)
    logging.disable()  # they log the text that they cannot read

    def answer(turn: Sequence) -> object:
        signal.signal(signal.SIGVTALRM, _end)
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_S, 0.1)
            return parse(*turn, *parsers)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    answer_calls(fd, answer)


def _end(*_: object) -> None:
    """Ends only the parser, by an exit, because some catch every Exception. If a parser catches
    exits too, as llama3's does, the process ends."""
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    sys.exit()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
