"""What `megagrpo view` reads, bounds, writes and serves; the page itself is opened in test_view_browser.py."""

import gzip
import json
import re
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from html.parser import HTMLParser

import pytest
from made_run import HOSTILE, made_batch, made_groups, make_run

from megagrpo import cli
from megagrpo.config.schema import LogConfig
from megagrpo.monitor.record import StepLog
from megagrpo.monitor.rollouts import RolloutLog
from megagrpo.system.run_folder import RunFolder
from megagrpo.view.command import view_data, write_view
from megagrpo.view.run_data import ViewLimits, curves, read_run
from megagrpo.view.samples import read_samples
from megagrpo.view.serve import page_server, stamp_of
from megagrpo.view.steps import spread, timeline_steps
from megagrpo.view.trace import trace_events


class Scripts(HTMLParser):
    """The script elements of a page as a browser finds them: [(type, text)], and every tag."""

    def __init__(self):
        super().__init__()
        self.found: list[list[str]] = []
        self.tags: set[str] = set()
        self._inside = False

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self._inside = tag == "script"
        if self._inside:
            self.found.append([dict(attributes).get("type", ""), ""])

    def handle_data(self, data):
        if self._inside:
            self.found[-1][1] += data

    def handle_endtag(self, tag):
        self._inside = False


def data_of(page: str) -> dict:
    parser = Scripts()
    parser.feed(page)
    (text,) = (text for kind, text in parser.found if kind == "application/json")
    return json.loads(text)


def test_one_page_holds_it_all(tmp_path, capsys):
    make_run(tmp_path / "run")
    assert cli.main(["view", str(tmp_path / "run")]) == 0
    assert f"page: {tmp_path / 'run' / 'view.html'}" in capsys.readouterr().out
    page = (tmp_path / "run" / "view.html").read_text()
    (run,) = data_of(page)["runs"]
    assert run["name"] == "run" and run["steps"] == [0, 1, 2, 3, 4, 5] and run["notes"] == []
    assert run["metrics"]["reward/mean"] == [None, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert run["metrics"]["optim/grad_norm"] == [None] * 6  # infinite: no number
    assert run["metrics"]["eval/accuracy"] == [0.25, *[None] * 5]
    assert [group["step"] for group in run["groups"]] == [step for step in range(1, 6) for _ in range(3)]
    first, *_, hostile = run["groups"][0]["samples"]
    assert (first["reward"], first["advantage"], first["finish"], first["version"]) == (1.0, 1.5, "stop", 0)
    assert first["tokens"] == {"ids": [5, 6], "difference": [0.002, 0.002]}
    assert (hostile["text"], hostile["reward"], hostile["outcome"]) == (HOSTILE, None, "timeout")
    assert "tokens" not in run["groups"][2]["samples"][0] and run["groups"][2]["samples"][0]["advantage"] == 1.5
    assert run["pieces"] == {"5": " one", "6": "<b>", "9": "é"}


def test_nothing_of_a_response_becomes_part_of_the_page(tmp_path):
    folder = make_run(tmp_path / "<b>run")
    write_view([folder], ViewLimits(), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    parser = Scripts()
    parser.feed(page)
    assert [kind for kind, _ in parser.found] == ["", "application/json", ""]
    assert not {"img", "b", "iframe", "a"} & parser.tags, "elements that only responses have"
    assert HOSTILE in [sample["text"] for sample in data_of(page)["runs"][0]["groups"][0]["samples"]]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy and "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.split("style-src")[0], "a script of ours is known by its hash"


def test_runs_are_compared(tmp_path):
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", level=0.2)]
    data = view_data(folders, ViewLimits())
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert [run["metrics"]["reward/mean"][-1] for run in data["runs"]] == [0.5, 0.7]
    twins = [make_run(tmp_path / part / "run", num_steps=1) for part in "cd"]
    names = [run["name"] for run in view_data(twins, ViewLimits())["runs"]]
    assert names == [str(tmp_path / "c" / "run"), str(tmp_path / "d" / "run")]


def test_what_is_no_run_is_said(tmp_path, capsys):
    assert cli.main(["view", str(tmp_path / "absent")]) == 2
    assert "metrics.jsonl: no such file" in capsys.readouterr().err
    folder = make_run(tmp_path / "run", num_steps=1)
    for rank in range(2):
        folder.timeline_file(rank).unlink()
    with pytest.raises(ValueError, match=r"--trace: .*log\.timeline"):
        write_view([folder], ViewLimits(), folder.view, tmp_path / "trace.json")


def test_serving_writes_no_files(tmp_path, capsys):
    assert cli.main(["view", str(tmp_path), "--serve", "--output", "x.html"]) == 2
    assert "--serve writes no files" in capsys.readouterr().err


def test_a_run_without_the_new_records_is_shown(tmp_path):
    """A folder of an earlier version, or with everything switched off."""
    folder = RunFolder(tmp_path / "run")
    log, samples = StepLog(folder, LogConfig(tensorboard=False)), RolloutLog(folder, 0, 1)
    log.write(1, {"reward/mean": 0.5})
    samples.write(1, made_groups(1))
    for writer in (log, samples):
        writer.close()
    write_view([folder], ViewLimits(), folder.view)
    (run,) = data_of(folder.view.read_text())["runs"]
    assert run["timeline"] == [] and not folder.trace.exists()
    assert [sample["advantage"] for sample in run["groups"][0]["samples"]] == [None] * 4


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_long_curves_are_means_of_bins():
    entries = [{"step": step, "a/b": float(step), **({"c/d": 1.0} if step == 7 else {})} for step in range(1, 5001)]
    steps, metrics, notes = curves(entries)
    assert (steps[0], steps[-1], len(steps)) == (3, 5000, 1667)
    assert metrics["a/b"][:2] == [2.0, 5.0] and [at for at, v in enumerate(metrics["c/d"]) if v is not None] == [2]
    assert notes == ["curves: every point is the mean of 3 steps"]


def test_samples_are_bounded_in_bytes_and_spread_over_steps(tmp_path):
    folder = RunFolder(tmp_path)
    log = RolloutLog(folder, 0, 1)
    for step in range(1, 301):
        log.write(step, made_groups(step, num_groups=6))
    log.close()
    data, notes = read_samples(folder, 150_000)
    size = len(json.dumps(data))
    steps = [group["step"] for group in data["groups"]]
    assert 75_000 < size < 450_000, "estimated, not measured: about what was asked for"
    assert steps[0] == 1 and steps[-1] == 300 and len(set(steps)) == 200
    assert all(group["group"] == 0 for group in data["groups"] if steps.count(group["step"]) == 1)
    assert "200 of 300 steps" in notes[0] and "--sample-mb 0.15" in notes[1]
    everything, notes = read_samples(folder, 1e9)
    assert len(everything["groups"]) == 1200 and notes == ["samples: of 200 of 300 steps, evenly spread"]


def test_one_huge_response_does_not_fill_the_page(tmp_path):
    folder = RunFolder(tmp_path)
    (group,) = made_groups(1, num_groups=1)
    long = type(group.samples[0])(**{**vars(group.samples[0]), "text": "x" * 1_000_000})
    log = RolloutLog(folder, 0, 1)
    log.write(1, [type(group)(0, group.prompt, (long, *group.samples[1:]), group.outcomes)])
    log.close()
    data, _ = read_samples(folder, 50_000)
    text = data["groups"][0]["samples"][0]["text"]
    assert len(text) < 20_100 and text.endswith("[... 980000 more characters]")


def test_the_last_steps_of_the_timeline(tmp_path):
    folder = make_run(tmp_path, num_steps=6)
    steps, notes = timeline_steps(folder, 2)
    assert [step["label"] for step in steps] == ["5", "6"]
    assert notes == ["timeline: the last 2 of 6 steps (--timeline-steps)"]
    assert timeline_steps(folder, 0) == ([], [])


def test_spread():
    assert spread(range(5), 7) == [0, 1, 2, 3, 4]
    assert spread(range(101), 3) == [0, 50, 100]
    assert len(set(spread(range(1000), 64))) == 64


# ---- timeline and trace ----------------------------------------------------------------------------------------------


def test_ranks_are_merged_on_one_axis(tmp_path):
    folder = make_run(tmp_path, num_steps=1)
    for rank, start in ((0, 1000.0), (1, 1000.5)):
        line = json.loads(folder.timeline_file(rank).read_text())
        line |= {"start": start, "phases": [["rollout", 0.0, 2.0]], "engines": [f"engine-{rank}"]}
        line |= {"requests": [[0, 0.25, 1.0, 4]], "num_requests": 3, "calls": []}
        folder.timeline_file(rank).write_text(json.dumps(line) + "\n")
    ((step,), _) = timeline_steps(folder, 5)
    assert step["start"] == 1000.0 and step["engines"] == ["engine-0", "engine-1"]
    assert [rank["phases"] for rank in step["ranks"]] == [[["rollout", 0.0, 2.0]], [["rollout", 0.5, 2.5]]]
    assert step["requests"] == [[0, 0.25, 1.0, 4, 3.0], [1, 0.75, 1.5, 4, 3.0]], "each stands for three"


def test_trace_events_are_well_formed(tmp_path):
    folder = make_run(tmp_path, num_steps=3)
    write_view([folder], ViewLimits(), tmp_path / "page.html")
    events = json.loads(gzip.decompress(folder.trace.read_bytes()))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "b", "e", "C"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {(1, 0): "rank 0", (1, 1): "rank 1", (2, 0): "engine-0", (2, 1): "engine-1"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in slices} == {"rollout", "update", "publish", "digest"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 and (event["pid"], event["tid"]) in threads for event in slices)
    assert {event["args"]["step"] for event in slices} == {"1", "2", "3"}
    begun, ended = ({e["id"]: e["ts"] for e in events if e["ph"] == kind} for kind in "be")
    assert len(begun) == 24 and all(ended[number] >= start for number, start in begun.items())
    running = [event["args"]["requests"] for event in events if event["ph"] == "C"]
    assert max(running) > 1 and running[-1] == 0
    assert trace_events([]) and all(event["ph"] == "M" for event in trace_events([]))


def test_a_trace_of_its_own_name(tmp_path, capsys):
    make_run(tmp_path / "run", num_steps=1)
    words = ["--output", str(tmp_path / "p.html"), "--trace", str(tmp_path / "t.json")]
    assert cli.main(["view", str(tmp_path / "run"), *words]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.html", "run", "t.json"]
    assert not (tmp_path / "run" / "trace.json.gz").exists() and "p.html" in capsys.readouterr().out


# ---- serving ---------------------------------------------------------------------------------------------------------


@contextmanager
def serving(folder: RunFolder):
    with page_server(lambda: view_data([folder], ViewLimits()), lambda: stamp_of([folder]), "run", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def get(url: str, host: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_new_steps_are_served(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=2)
    with serving(folder) as url:
        status, page = get(url)
        assert status == 200 and "connect-src 'self'" in page
        data = data_of(page)
        assert data["live"] and data["runs"][0]["steps"] == [0, 1, 2]
        assert get(f"{url}/data?known={data['stamp']}") == (204, "")
        make_run(tmp_path / "run", num_steps=3, start_step=2)
        status, text = get(f"{url}/data?known={data['stamp']}")
        assert status == 200 and "<" not in text
        assert json.loads(text)["runs"][0]["steps"] == [0, 1, 2, 3]
        assert get(f"{url}/run/metrics.jsonl")[0] == 404


def test_only_this_machine_is_answered(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=1)
    with serving(folder) as url:
        port = url.rpartition(":")[2]
        assert get(url, f"localhost:{port}")[0] == 200
        assert get(url, f"evil.example:{port}")[0] == 403, "a name that another site lets point here"
        with pytest.raises(ValueError, match=f"--port {port}: .*in use"):
            page_server(dict, str, "run", int(port))


def test_a_page_of_a_run_that_is_being_written(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=2)
    for path in (folder.metrics, folder.timeline_file(0), folder.trained_file(0)):
        with path.open("a") as file:
            file.write('{"step": 3, "rewa')
    run = read_run(folder, "run", ViewLimits())
    assert run["steps"] == [0, 1, 2] and len(run["timeline"]) == 2
    made_batch([])  # a rank without samples
