"""`megagrpo try` without an engine: what it does when the engine ends, and what it prints."""

import asyncio
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from megagrpo.rollout.batches import SampledBatch
from megagrpo.rollout.control import ServiceControl
from megagrpo.rollout.generation import GenerationFailed
from megagrpo.tools import trial
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample


class Status(BaseHTTPRequestHandler):
    """A service whose engine has ended and starts again."""

    def do_GET(self):
        engine = {"id": "e0", "url": "", "state": "starting", "weight_version": None, "incarnation": 2}
        engine |= {"restarts": 1, "pid": 0, "reason": "killed by signal 9"}
        body = json.dumps({"failed": None, "engines": [engine]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_an_engine_that_ends_is_noticed_long_before_the_timeout():
    async def for_ever(_):
        await asyncio.sleep(600)

    with HTTPServer(("127.0.0.1", 0), Status) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        control = ServiceControl(f"http://127.0.0.1:{server.server_port}", "key")
        with pytest.raises(GenerationFailed, match="the engine ended: killed by signal 9"):
            asyncio.run(trial._sample(SimpleNamespace(sample_share=for_ever), SampledBatch(None), control, 600.0))
        server.shutdown()


def test_finished_groups_are_printed_without_what_a_terminal_obeys(capsys):
    sample = Sample(0, (5,), (-0.5,), "stop", 0, "red \x1b[31m\x07\n\ttext")
    outcome = Outcome("error", detail="line 1\nline 2 \x1b]0;title")
    group = RolloutGroup(0, Prompt(0, "?", (1,), ""), (sample,), (outcome,))
    trial._show(SampledBatch(None, finished={0: group}), lambda ids: sample.text)
    said = capsys.readouterr().out
    assert "model > red  [31m" in said and "\ttext" in said
    assert "line 1\nline 2  ]0;title" in said and "\x1b" not in said and "\x07" not in said
