"""The two dialects of the gateway: how requests write messages and tools, and how answers write a
turn."""

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from megagrpo.data.messages import Message, Tools, text_of
from megagrpo.rollout.agents.conversation import ChatTurn, Refused
from megagrpo.system.errors import explained

Body = dict
Piece = tuple[str, Body | bytes]  # name of an event of a stream, "" for none, and its data
Asked = tuple[list[Message], Tools]
_ANTHROPIC_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True)
class Dialect:
    """A protocol of chat endpoints. Sampling parameters in a request are ignored, because the
    experiment sets them."""

    read: Callable[[Body], Asked]  # request -> in OpenAI's terms; raises Refused
    write: Callable[[ChatTurn, Body, str], Body]  # (turn, request, model) -> answer
    pieces: Callable[[Body, Body], Iterable[Piece]]  # (answer, request) -> the same as a stream
    error: Callable[[int, str, str], Body]  # (status, code, text) -> answer


def _read_openai(body: Body) -> Asked:
    messages, choice = body.get("messages"), body.get("tool_choice") or "auto"
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Refused("invalid_request", "messages is a list of objects")
    if (body.get("n") or 1) != 1:
        raise Refused(
            "invalid_request", "n is 1: ask again for another turn after the same messages"
        )
    format = body.get("response_format") or {"type": "text"}
    if choice not in ("auto", "none") or format != {"type": "text"}:
        raise Refused(
            "invalid_request",
            "a forced tool_choice or response_format would not be the policy's own choice",
        )
    return messages, body.get("tools") if choice == "auto" else None


def _finish(turn: ChatTurn) -> str:
    end = turn.response.finish_reason
    if end == "stop" and turn.message.get("tool_calls"):
        return "tool_calls"
    return end


def _write_openai(turn: ChatTurn, body: Body, model: str) -> Body:
    """Returns the answer. If the request asks for ids and log-probabilities, they have SGLang's and
    vLLM's names."""
    ids, logprobs = turn.response.token_ids, turn.response.logprobs
    num_prompt = turn.num_tokens - len(ids)
    choice: dict[str, object] = {
        "index": 0,
        "message": turn.message,
        "finish_reason": _finish(turn),
        "logprobs": None,
        "text": turn.text,  # before any parser
    }
    answer: dict[str, object] = {
        "id": f"chatcmpl-{turn.number}",
        "object": "chat.completion",
        "choices": [choice],
    }
    if body.get("logprobs"):
        pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
        content = [
            {"token": f"token_id:{i}", "logprob": lp, "bytes": None, "top_logprobs": []}
            for i, lp in pairs
        ]
        choice["logprobs"] = {"content": content}
    if body.get("return_token_ids"):
        prompt = turn.context()[:num_prompt]
        choice |= {"prompt_token_ids": prompt, "response_token_ids": ids, "token_ids": ids}
        answer["prompt_token_ids"] = prompt
    if body.get("return_meta_info"):
        pairs = zip(logprobs.tolist(), ids.tolist(), strict=True)
        meta = {"output_token_logprobs": [[lp, i, None] for lp, i in pairs]}
        choice["meta_info"] = meta | {"weight_version": str(turn.response.newest_version)}
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": len(ids),
        "total_tokens": turn.num_tokens,
    }
    return answer | {"created": int(time.time()), "model": model, "usage": usage}


def _openai_pieces(answer: Body, body: Body) -> Iterable[Piece]:
    """Yields the whole message in one piece, then its end: ids are known when it is complete."""
    [choice] = answer["choices"]
    rest = {
        name: value for name, value in choice.items() if name not in ("message", "finish_reason")
    }
    message = dict(choice["message"])
    if message.get("tool_calls"):
        calls = enumerate(message["tool_calls"])
        message["tool_calls"] = [{"index": i, **call} for i, call in calls]
    head = {name: answer[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    yield "", head | {"choices": [rest | {"delta": message, "finish_reason": None}]}
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield "", head | {"choices": [end]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield "", head | {"choices": [], "usage": answer["usage"]}
    yield "", b"[DONE]"


def _openai_error(status: int, code: str, text: str) -> Body:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": text, "type": kind, "code": code, "param": None}}


def _from_anthropic(message: Message) -> list[Message]:
    """Returns a message of blocks as messages; the output of each tool becomes one message."""
    blocks, out = message["content"] or [], list[Message]()
    if isinstance(message["content"], str):
        blocks = [{"type": "text", "text": message["content"]}]
    texts = [
        block for block in blocks if block["type"] not in ("tool_use", "tool_result", "thinking")
    ]
    for block in blocks:
        if block["type"] == "tool_result":
            content = text_of({"content": block.get("content")})
            out.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
    if message["role"] == "assistant":
        calls = [
            {
                "id": block["id"],
                "type": "function",
                "function": {
                    "name": block["name"],
                    "arguments": block["input"].get("_raw") or json.dumps(block["input"]),
                },
            }
            for block in blocks
            if block["type"] == "tool_use"
        ]
        reasoning = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        extra = {"tool_calls": calls, "reasoning_content": reasoning}
        extra = {name: value for name, value in extra.items() if value}
        return [{"role": "assistant", "content": text_of({"content": texts}), **extra}]
    if texts:
        out.append({"role": message["role"], "content": text_of({"content": texts})})
    return out


def _read_anthropic(body: Body) -> Asked:
    with explained("messages or tools cannot be read"):
        messages = [part for message in body["messages"] for part in _from_anthropic(message)]
        system = text_of({"content": body.get("system")})
        if system:
            messages.insert(0, {"role": "system", "content": system})
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description", ""),
                    "parameters": tool["input_schema"],
                },
            }
            for tool in body.get("tools") or []
        ]
    choice = (body.get("tool_choice") or {}).get("type", "auto")
    if choice not in ("auto", "none"):
        raise Refused(
            "invalid_request", "a forced tool_choice would not be the policy's own choice"
        )
    return messages, tools if tools and choice == "auto" else None


def _write_anthropic(turn: ChatTurn, body: Body, model: str) -> Body:
    content: list[dict[str, object]] = []
    reasoning = turn.message.get("reasoning_content")
    if reasoning:
        content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if turn.message["content"] or not turn.message.get("tool_calls"):
        content.append({"type": "text", "text": turn.message["content"]})
    for call in turn.message.get("tool_calls") or []:
        written = call["function"]["arguments"] or "{}"
        arguments: object = {"_raw": written}  # what a model wrote need not be JSON
        with suppress(ValueError, TypeError, RecursionError):
            read = json.loads(written) | {}  # an object
            # which a client can send back: not with NaN or half a character
            json.dumps(read, ensure_ascii=False, allow_nan=False).encode()
            if "_raw" not in read:
                arguments = read
        content.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": arguments,
            }
        )
    num_sampled = len(turn.response.token_ids)
    return {
        "id": f"msg_{turn.number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": _ANTHROPIC_ENDS[_finish(turn)],
        "stop_sequence": None,
        "usage": {"input_tokens": turn.num_tokens - num_sampled, "output_tokens": num_sampled},
    }


def _anthropic_pieces(answer: Body, body: Body) -> Iterable[Piece]:
    """Yields a stream of events: each block in one delta."""
    start = {**answer, "content": [], "stop_reason": None}
    yield "message_start", {"type": "message_start", "message": start}
    for index, block in enumerate(answer["content"]):
        empty, delta = {
            "text": ({"text": ""}, {"type": "text_delta", "text": block.get("text")}),
            "thinking": (
                {"thinking": ""},
                {"type": "thinking_delta", "thinking": block.get("thinking")},
            ),
            "tool_use": (
                {"input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(block.get("input"))},
            ),
        }[block["type"]]
        at = {"index": index}
        yield (
            "content_block_start",
            {"type": "content_block_start", **at, "content_block": block | empty},
        )
        yield "content_block_delta", {"type": "content_block_delta", **at, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", **at}
    end = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    yield "message_delta", {"type": "message_delta", "delta": end, "usage": answer["usage"]}
    yield "message_stop", {"type": "message_stop"}


def _anthropic_error(status: int, code: str, text: str) -> Body:
    kind = {400: "invalid_request_error", 401: "authentication_error"}.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": f"{code}: {text}"}}


OPENAI = Dialect(_read_openai, _write_openai, _openai_pieces, _openai_error)
ANTHROPIC = Dialect(_read_anthropic, _write_anthropic, _anthropic_pieces, _anthropic_error)
