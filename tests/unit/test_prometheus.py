"""GET /metrics: what it says, read by Prometheus' own parser, and by its server where Debian's package is installed."""

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from megagrpo.monitor.prometheus import exposition, last_entry
from megagrpo.rollout.service.node import free_port
from megagrpo.types import EngineInfo
from tests.experiments import ROOT

LINES = '{"step": 1, "reward/mean": 0.25}\n{"step": 2, "reward/mean": 0.5, "optim/grad_norm": null}\n'
MANY = {"step": 3, **{f"source/name_{number}_reward_mean": 0.25 for number in range(3000)}}


def engine(number: int, state: str, version: int | None = None, model: str = "") -> EngineInfo:
    return EngineInfo(f"engine-{number}", "", state, version, 1, number, 0, "", model=model)


ENGINES = [engine(0, "ready", 7), engine(1, "ready", 7), engine(2, "starting"), engine(3, "ready", 1, "big")]


def said(text: bytes) -> dict[tuple, float]:
    families = text_string_to_metric_families(text.decode())
    samples = [sample for family in families for sample in family.samples]
    return {(one.name, *sorted(one.labels.values())): one.value for one in samples}


def test_the_last_step_and_the_engines(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(LINES)
    values = said(exposition("mine", metrics, ENGINES))
    assert values["megagrpo_metric", "mine", "reward/mean"] == 0.5 and values["megagrpo_metric", "mine", "step"] == 2
    assert values["megagrpo_engines", "", "mine", "ready"] == 2
    assert values["megagrpo_engines", "big", "mine", "ready"] == values["megagrpo_engines", "", "mine", "starting"] == 1
    assert values["megagrpo_engine_restarts", "engine-2", "mine"] == 2
    assert values["megagrpo_engine_weight_version", "engine-1", "mine"] == 7
    assert ("megagrpo_engine_weight_version", "engine-2", "mine") not in values, "nothing verified yet"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, {}),
        ("", {}),
        (LINES + '{"step": 3, "rew', {"step": 2, "reward/mean": 0.5}),
        (LINES + '{"step": 3, "reward/mean": 1.0}', {"step": 2, "reward/mean": 0.5}),
        (LINES + "broken\n", {"step": 2, "reward/mean": 0.5}),
        (LINES + '{"step": 2, "eval/accuracy": 0.25}\n', {"step": 2, "reward/mean": 0.5, "eval/accuracy": 0.25}),
        (LINES + json.dumps(MANY) + "\n", MANY),
    ],
)
def test_the_last_whole_line(content, expected, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    if content is not None:
        metrics.write_text(content)
    assert last_entry(metrics) == expected


@contextmanager
def served(text: bytes) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers.get("Authorization") == "Bearer the key"
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.end_headers()
            self.wfile.write(text if allowed else b"")

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus not found; install prometheus")
def test_the_real_prometheus_scrapes_what_the_dashboard_asks_for(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(LINES)
    text = exposition("mine", tmp_path / "metrics.jsonl", ENGINES)
    port = free_port("127.0.0.1")
    with served(text) as target:
        job = {
            "job_name": "megagrpo",
            "scrape_interval": "1s",
            "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
        }
        config = {"scrape_configs": [job | {"authorization": {"credentials": "the key"}}]}
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))
        words = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        server = subprocess.Popen(["prometheus", *words, f"--web.listen-address=127.0.0.1:{port}"])
        try:
            for query, expected in (('megagrpo_metric{name="reward/mean"}', 0.5), ("sum(megagrpo_engines)", 4.0)):
                assert asked(port, query) == expected
            for query in dashboard_queries():
                assert asked(port, query) is not None, query
        finally:
            server.terminate()
            server.wait(30)


def test_the_dashboard_names_metrics_that_the_pages_explain():
    text = Path(ROOT / "launch" / "grafana.json").read_text()
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    names = re.findall(r'name=\\"([^"\\]+)', text)
    assert len(names) > 8 and not [name for name in names if not explained(name, pages)], names


def explained(name: str, pages: str) -> bool:
    return f"`{name}`" in pages or (name.startswith("time/") and "`time/*_s`" in pages)


def dashboard_queries() -> list[str]:
    """The dashboard's queries about what LINES and ENGINES have."""
    panels = json.loads(Path(ROOT / "launch" / "grafana.json").read_text())["panels"]
    queries = [target["expr"].replace("$run", "mine") for panel in panels for target in panel["targets"]]
    known = ("reward/mean", "megagrpo_engine")
    return [query for query in queries if any(word in query for word in known)]


def asked(port: int, query: str) -> float | None:
    """The first value, once there is one."""
    for _ in range(60):
        try:
            url = f"http://127.0.0.1:{port}/api/v1/query"
            result = httpx.get(url, params={"query": query}, trust_env=False).json()["data"]["result"]
            if result:
                return float(result[0]["value"][1])
        except (httpx.TransportError, KeyError):
            pass
        time.sleep(0.5)
    return None
