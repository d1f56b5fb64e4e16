"""Built-in environments: `mcp` with servers on stdio and HTTP, `openenv` as openenv-core 0.3.0 speaks, `python`."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from megagrpo.environments.openenv import OpenEnv
from megagrpo.environments.python_programs import PythonPrograms
from megagrpo.rollout.agents import Unavailable
from megagrpo.sandbox.sandbox import isolation
from tests.experiments import live_children
from tests.mcp_server import NOTICE, TOOLS, answer

ROW = {"prompt": "2 + 3?", "answer": "5", "source": "", "extra": {}, "chat": False}
COMMAND = f"{sys.executable} {Path(__file__).parents[1] / 'mcp_server.py'}"


def call(name: str, **arguments: int) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def servers() -> list[psutil.Process]:
    """Those that were started and have not ended."""
    return [child for child in live_children() if "mcp_server" in " ".join(child.cmdline())]


class Handler(BaseHTTPRequestHandler):
    """Answers by JSON, and calls of tools by a stream of events."""

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        first = message["method"] == "initialize"
        asks = message["method"] == "server/discover"  # whether the server is a newer one
        assert first or asks or self.headers["mcp-session-id"] == "s1"
        if message["method"] == "tools/call" and hasattr(self.server, "status"):
            self.send_error(self.server.status)
            return
        self.send_response(200 if "id" in message else 202)
        if first:
            self.send_header("Mcp-Session-Id", "s1")
        stream = message["method"] == "tools/call"
        found = getattr(self.server, "found", None) if stream else None
        body = (
            json.dumps({"jsonrpc": "2.0", "id": message["id"], **(found or answer(message, []))}, indent=1)
            if "id" in message
            else ""
        )
        if stream:
            lines = body.replace("\n", "\ndata: ")  # of one event
            body = f": comment\n\nevent: message\ndata: {json.dumps(NOTICE)}\n\ndata:\n\ndata: {lines}\n\n"
        self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        self.send_error(405)  # it says nothing unless it is asked

    def do_DELETE(self) -> None:
        self.server.ended = self.headers["mcp-session-id"]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def mcp_tools() -> type:
    pytest.importorskip("mcp")
    from megagrpo.environments.mcp_tools import McpTools

    return McpTools


@pytest.fixture
def listening() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("way", ["command", "url"])
def test_a_model_calls_tools_until_it_answers(way: str, mcp_tools, listening):
    url = f"http://127.0.0.1:{listening.server_port}/mcp"
    environment = mcp_tools(ROW, 0, "exact", **({"command": COMMAND} if way == "command" else {"url": url}))
    said = environment.reset()
    assert said.endswith("\n\n2 + 3?") and '{"name": "add", "description": "The sum."' in said
    assert '"fail"' in said and "left out" not in said
    calls = [call("add", a=2, b=3), "and", call("fail"), call("add"), call("none"), "<tool_call>2 +</tool_call>"]
    results, reward, done = environment.step(" ".join(calls))
    told = [part.strip() for part in results.replace("</tool_response>", "").split("<tool_response>")[1:]]
    assert told[:4] == [
        *("5\n[image]", "error: no luck", "error: a and b are missing", "error: no tool 'none'; there are add, fail")
    ]
    assert told[4].startswith("error: the call is no JSON with name and arguments") and (reward, done) == (0.0, False)
    assert environment.step("6") == (None, 0.0, True) and environment.step("5") == (None, 1.0, True)
    environment.close()
    assert way == "command" or listening.ended == "s1"
    assert not servers()


@pytest.mark.parametrize(
    "bad, said",
    [
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>', "should be an object"),
        ('<tool_call>["add"]</tool_call>', "no JSON with name"),
        ("<tool_call>" * 200_000, "the call has no end"),  # a regular expression took minutes
        ('<tool_call>{"name": ["add"], "arguments": {}}</tool_call>', "no tool ['add']"),
    ],
)
def test_a_bad_call_is_answered_with_text_and_never_reaches_the_server(mcp_tools, bad, said):
    environment = mcp_tools(ROW, 0, "exact", command=COMMAND)
    environment.reset()
    results, reward, done = environment.step(bad)
    assert said in results and (reward, done) == (0.0, False)
    assert "\n5\n" in environment.step(call("add", a=2, b=3))[0]  # the server lives
    environment.close()


def test_a_turn_has_time_for_some_calls_only(mcp_tools):
    """Else a turn of a thousand calls would end the process of all environments in it."""
    environment = mcp_tools(ROW, 0, "exact", command=COMMAND)
    environment._timeout_s = -1.0
    results, reward, done = environment.step(2 * call("add", a=2, b=3))
    assert results.count("error: not called: those before took") == 2 and (reward, done) == (0.0, False)
    environment.close()


@pytest.mark.parametrize("content", [{"content": None}, {"content": [{"type": "film"}]}, {}])
def test_an_answer_that_is_not_the_protocols_is_said(mcp_tools, listening, content):
    environment = mcp_tools(ROW, 0, "exact", url=f"http://127.0.0.1:{listening.server_port}/mcp")
    listening.found = {"result": content}
    said, *_ = environment.step(call("add", a=2, b=3))
    assert "error: the tool's answer is not the protocol's: " in said
    del listening.found
    assert "\n5\n" in environment.step(call("add", a=2, b=3))[0], "the session goes on"
    environment.close()


TEXT = {"type": "text", "text": "the file follows"}
NUMBER = {"type": "text", "text": "7"}
SPELLED = {"type": "text", "text": '{ "code": 7 }'}
FILE = {"uri": "file:///a.py", "mimeType": "text/x-python"}


@pytest.mark.parametrize(
    "result, said",
    [
        (
            {"content": [TEXT, {"type": "resource", "resource": {**FILE, "text": "print(42)"}}]},
            f"{TEXT['text']}\nprint(42)",
        ),
        (
            {"content": [{"type": "resource", "resource": {**FILE, "blob": "AAAA"}}]},
            "[resource file:///a.py text/x-python]",
        ),
        ({"content": [{"type": "resource_link", "name": "a.py", **FILE}]}, "[resource file:///a.py: a.py]"),
        ({"content": [], "structuredContent": {"temperature": 22.5}}, '{"temperature": 22.5}'),
        ({"content": [], "structuredContent": {"result": []}}, '{"result": []}'),
        (
            {"content": [TEXT], "structuredContent": {"code": 7}, "isError": True},
            f'error: {TEXT["text"]}\n{{"code": 7}}',
        ),
        ({"content": [TEXT], "structuredContent": {"result": TEXT["text"]}}, TEXT["text"]),
        ({"content": [NUMBER], "structuredContent": {"result": "7"}}, "7"),
        ({"content": [NUMBER] * 2, "structuredContent": {"result": ["7", "7"]}}, "7\n7"),
        ({"content": [SPELLED], "structuredContent": {"code": 7}}, SPELLED["text"]),
        (
            {"content": [SPELLED] * 2, "structuredContent": {"result": [{"code": 7}] * 2}},
            f"{SPELLED['text']}\n{SPELLED['text']}",
        ),
        ({"content": [], "structuredContent": {"code": 7}, "isError": True}, 'error: {"code": 7}'),
        ({"content": [], "isError": True}, "error: the tool failed without a word"),
        ({"content": []}, ""),
    ],
)
def test_every_form_of_a_result_reaches_the_model_as_text(mcp_tools, listening, result, said):
    environment = mcp_tools(ROW, 0, "exact", url=f"http://127.0.0.1:{listening.server_port}/mcp")
    listening.found = {"result": result}
    assert environment.step(call("add", a=2, b=3))[0] == f"<tool_response>\n{said}\n</tool_response>"
    environment.close()


def test_the_model_reads_a_description_as_it_is_written(mcp_tools, listening, monkeypatch):
    monkeypatch.setitem(TOOLS[0], "description", "和")
    environment = mcp_tools(ROW, 0, "exact", url=f"http://127.0.0.1:{listening.server_port}/mcp")
    assert '"description": "和"' in environment.reset()
    environment.close()


def test_a_result_that_is_cut_says_so(mcp_tools, listening):
    environment = mcp_tools(ROW, 0, "exact", url=f"http://127.0.0.1:{listening.server_port}/mcp", max_chars=3)
    for text, said in ("abc", "abc"), ("abcd", "abc\n[output cut]"):
        listening.found = {"result": {"content": [{"type": "text", "text": text}]}}
        assert environment.step(call("add", a=2, b=3))[0] == f"<tool_response>\n{said}\n</tool_response>"
    environment.close()


@pytest.mark.parametrize("status", [404, 503])
def test_a_session_that_the_server_has_lost_is_no_answer_of_a_tool(mcp_tools, listening, status):
    environment = mcp_tools(ROW, 0, "exact", url=f"http://127.0.0.1:{listening.server_port}/mcp")
    listening.status = status
    with pytest.raises(Unavailable, match="the server is gone"):
        environment.step(call("add", a=2, b=3))
    environment.close()


def test_a_server_that_is_gone_is_no_fault_of_the_model(mcp_tools, listening):
    environment = mcp_tools(ROW, 0, "exact", command=f"{COMMAND} die")
    with pytest.raises(Unavailable, match="tools/call: the server is gone"):
        environment.step(call("add", a=1, b=1))
    environment.close()
    with pytest.raises(Unavailable, match="tools/list: page '0' comes again and again"):
        mcp_tools(ROW, 0, "exact", command=f"{COMMAND} repeat")
    environment = mcp_tools(ROW, 0, "exact", command=f"{COMMAND} hang", timeout_s=1.0)
    with pytest.raises(Unavailable, match="tools/call: the server is gone"):
        environment.step(call("add", a=1, b=1))
    environment.close()
    assert not servers()
    with pytest.raises(Unavailable, match="No such file"):
        mcp_tools(ROW, 0, "exact", command="/no/such/server")
    listening.shutdown()
    listening.server_close()
    with pytest.raises(Unavailable, match="ConnectError"):
        mcp_tools(ROW, 0, "exact", url=f"http://127.0.0.1:{listening.server_port}/mcp")
    with pytest.raises(ValueError, match="one of them"):
        mcp_tools(ROW, 0, "exact")


LEVEL_ROW = {"prompt": "p", "answer": "", "source": "", "extra": {"level": 3}}


@pytest.fixture
def url() -> Iterator[str]:
    server_of = pytest.importorskip("websockets.sync.server")

    def session(socket) -> None:
        turn = 0
        for line in socket:
            message = json.loads(line)
            turn += message["type"] == "step"
            match message["type"], message.get("data"):
                case "close", _:
                    return
                case "step", {"message": "boom"}:
                    answer = {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "boom"}}
                case "step", {"message": "full"}:
                    answer = {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}
                case "step", {"message": "leave"}:
                    return
                case "step", {"message": "unscored"}:
                    answer = {"type": "observation", "data": {"observation": {}, "reward": None, "done": True}}
                case _, data:
                    observation = {"text": f"{message['type']} {json.dumps(data, ensure_ascii=False)}", "turn": turn}
                    said = {"observation": observation, "reward": 0.5 if turn else None, "done": turn == 2}
                    answer = {"type": "observation", "data": said}
            socket.send(json.dumps(answer))

    with server_of.serve(session, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}/ws"
        server.shutdown()
        thread.join()


def test_a_session_from_reset_to_done(url: str):
    environment = OpenEnv(LEVEL_ROW, 7, url, observation="text")
    assert environment.reset() == 'reset {"seed": 7, "level": 3}'
    assert environment.step("hi") == ('step {"message": "hi"}', 0.5, False)
    assert environment.step("ho") == (None, 0.5, True)
    environment.close()
    whole = OpenEnv(LEVEL_ROW, 7, url, action="code")
    assert json.loads(whole.reset() or "") == {"text": 'reset {"seed": 7, "level": 3}', "turn": 0}
    assert '\\"code\\": \\"和\\"' in str(whole.step("和")[0]), "not as \\u548c"
    whole.close()
    number = OpenEnv(LEVEL_ROW, 7, url, observation="turn")
    assert (number.reset(), number.step("hi")[0]) == ("0", "1")
    number.close()


def test_its_errors_and_a_server_that_is_gone(url: str):
    environment = OpenEnv(LEVEL_ROW, 7, url)
    with pytest.raises(RuntimeError, match="step: EXECUTION_ERROR: boom"):
        environment.step("boom")
    with pytest.raises(Unavailable, match="step: CAPACITY_REACHED: full"):
        environment.step("full")
    with pytest.raises(RuntimeError, match="without a reward in any step"):
        environment.step("unscored")
    environment.step("hi")
    environment.step("unscored")
    with pytest.raises(Unavailable, match="step: ConnectionClosed"):
        environment.step("leave")
    environment.close()
    with pytest.raises(Unavailable, match="refused"):
        OpenEnv(LEVEL_ROW, 7, "ws://127.0.0.1:1/ws")


QUESTION = ROW | {"prompt": "17 * 23?", "answer": "391"}


def block(program: str) -> str:
    return f"Let me see.\n```python\n{program}\n```\n"


def environment(**args: object) -> PythonPrograms:
    return PythonPrograms(QUESTION, 0, **{"grader": "math", **args})


@pytest.mark.parametrize("name", ["total_s", "test_s", "tolerance", "score", "mem"])
def test_an_argument_without_effect_on_programs_is_refused(name):
    with pytest.raises(ValueError, match=f"nothing reads '{name}'"):
        environment(**{name: 1})


def test_a_program_runs_and_a_turn_without_one_is_the_answer():
    played = environment()
    assert played.reset().endswith("17 * 23?") and "```python" in played.reset()
    assert played.step(block("x = 17 * 23\nprint(x)")) == ("```output\n391\n```\n", 0.0, False)
    assert played.step(r"So it is \boxed{391}.") == (None, 1.0, True)
    assert environment().step(r"\boxed{392}") == (None, 0.0, True)


@pytest.mark.parametrize(
    "program, shown",
    [
        ("print(kept)", "exit code 1: NameError: name 'kept' is not defined"),  # nothing is, from the program before
        ("print(1)\n1/0", "1\nexit code 1: ZeroDivisionError: division by zero"),
        ("while True: pass", "time limit"),
        ("x = bytearray(2**30)", "exit code 1: MemoryError"),
        ("while True: print('x' * 1000)", "output limit"),
        ("", ""),
    ],
)
def test_what_fails_is_shown_and_the_model_has_another_turn(program, shown):
    played = environment(run_s=2.0, memory_mb=128, output_kb=64, max_chars=100)
    played.step(block("kept = 1"))
    said, reward, done = played.step(block(program))
    assert said.startswith("```output\n") and said.rstrip("`\n").endswith(shown)
    assert len(said) <= 100 + len("```output\n[output cut]\n\n```\n")
    assert (reward, done) == (0.0, False)


@pytest.mark.parametrize(("max_chars", "shown"), [(0, "[output cut]\n"), (2, "[output cut]\n23"), (3, "123")])
def test_the_model_sees_the_end_of_an_output(max_chars: int, shown: str):
    assert environment(max_chars=max_chars).step(block("print(123)")) == (f"```output\n{shown}\n```\n", 0.0, False)


@pytest.mark.skipif(bool(isolation()), reason=f"no namespaces here: {isolation()}")
@pytest.mark.parametrize(
    "program",
    [f"print(open({__file__!r}).read())", "import socket; print(socket.create_connection(('127.0.0.1', 22)))"],
)
def test_a_program_sees_neither_files_nor_network(program):
    said, _, _ = environment().step(block(program))
    assert "exit code 1" in said and "Error" in said


@pytest.mark.parametrize(
    "args, message", [({"grader": "no_such"}, "no_such"), ({"memory": 5}, "memory"), ({"memory_mb": 1}, "64")]
)
def test_wrong_arguments_are_refused_before_the_rollout(args, message):
    with pytest.raises(ValueError, match=message):
        environment(**args)
