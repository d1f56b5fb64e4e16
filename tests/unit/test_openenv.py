"""The environment `openenv` with a server that speaks its protocol as openenv-core 0.3.0 does."""

import json
import threading
from collections.abc import Iterator

import pytest

from megagrpo.rollout.agents import Unavailable
from megagrpo.rollout.agents.built_in.openenv import OpenEnv

ROW = {"prompt": "p", "answer": "", "source": "", "extra": {"level": 3}}


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
                case "step", {"message": "leave"}:
                    return
                case _, data:
                    observation = {"text": f"{message['type']} {json.dumps(data)}"}
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
    environment = OpenEnv(ROW, 7, url, observation="text")
    assert environment.reset() == 'reset {"seed": 7, "level": 3}'
    assert environment.step("hi") == ('step {"message": "hi"}', 0.5, False)
    assert environment.step("ho") == (None, 0.5, True)
    environment.close()
    whole = OpenEnv(ROW, 7, url, action="code")
    assert json.loads(whole.reset() or "") == {"text": 'reset {"seed": 7, "level": 3}'}
    assert '\\"code\\": \\"1\\"' in str(whole.step("1")[0])
    whole.close()


def test_its_errors_and_a_server_that_is_gone(url: str):
    environment = OpenEnv(ROW, 7, url)
    with pytest.raises(RuntimeError, match="step: EXECUTION_ERROR: boom"):
        environment.step("boom")
    with pytest.raises(Unavailable, match="step: ConnectionClosed"):
        environment.step("leave")
    environment.close()
    with pytest.raises(Unavailable, match="refused"):
        OpenEnv(ROW, 7, "ws://127.0.0.1:1/ws")
