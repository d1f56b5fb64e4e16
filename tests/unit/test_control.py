"""The client of a rollout service's control endpoint, against a server that says who is connected."""

import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler

import pytest

from megagrpo.rollout.control import ServiceControl
from tests.experiments import until


@pytest.fixture
def service():
    """A control endpoint without engines, and the numbers of connections that it has, and has had."""
    counts = {"open": 0, "all": 0}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # which keeps connections open

        def setup(self):
            super().setup()
            counts["open"] += 1
            counts["all"] += 1

        def finish(self):
            super().finish()
            counts["open"] -= 1

        def do_GET(self):
            body = json.dumps({"router": "", "failed": None, "lost_hosts": 0, "engines": []}).encode()
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

        def log_message(self, *args):
            pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", counts
        server.shutdown()


def test_no_connection_outlives_its_call(service):
    """An idle one would be closed by the first thread that finds it too old, maybe when another was just given it."""
    url, counts = service
    control = ServiceControl(url, "key")
    control.status()
    control.status()
    until(lambda: counts == {"open": 0, "all": 2}, said=lambda: counts)
