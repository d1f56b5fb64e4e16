"""Finds the tool calls in texts by SGLang's own parsers, without an engine.

In a process of its own, as SGLang's imports are an engine's. Written against sglang 0.5.21.
"""

import json
import sys

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser


def calls_in(text: str, tools: list[dict], parser: str) -> list[list[object]]:
    """Returns [name, arguments] of each call, as an engine's /parse_function_call finds them.

    Raises ValueError for an unknown parser.
    """
    declared = [Tool.model_validate(tool) for tool in tools]
    _, calls = FunctionCallParser(declared, parser).parse_non_stream(text)
    return [[call.name, json.loads(call.parameters)] for call in calls]


if __name__ == "__main__":
    print(json.dumps([calls_in(**job) for job in json.load(sys.stdin)]))
