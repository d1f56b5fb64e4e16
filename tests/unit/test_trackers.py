"""Trackers with the real packages, offline: what they hold, one run over two starts, nothing left, never fatal."""

import importlib
import json
import math
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from megagrpo.check.problems import preflight
from megagrpo.config.load import load_config
from megagrpo.config.trackers import TrackedRun
from megagrpo.monitor import trackers
from megagrpo.monitor.trackers import tracker_logs
from megagrpo.system.environment import child_environment
from megagrpo.system.run_folder import RunFolder
from tests.experiments import QUICKSTART, python

pytestmark = pytest.mark.verifies("runs", "W&B's offline mode; MLflow, SwanLab and Trackio where they are installed")

PROJECT = "log.wandb={project: tests}"
OFFLINE = {"WANDB_MODE": "offline"}
TWO_STARTS = """
import os, sys
from pathlib import Path
from megagrpo.config.load import load_config
from megagrpo.monitor import trackers
from megagrpo.monitor.trackers import tracker_logs
from megagrpo.system.run_folder import RunFolder

print(os.getpid())
config, folder = load_config(sys.argv[1], [sys.argv[2]]), RunFolder(Path(sys.argv[3]))
(first,) = tracker_logs(config, folder, 0, print)
with first as log:
    log.write(0, {"eval/accuracy": 0.25})
    log.write(1, {"reward/mean": 0.5, "optim/grad_norm": float("inf")})
    log.write(2, {"reward/mean": 0.625})
(second,) = tracker_logs(config, folder, 1, print)  # resumed from the checkpoint of step 1
try:
    with second as log:
        log.write(2, {"reward/mean": 0.75})
        raise KeyError("the rank fails")
except KeyError:
    pass
refused = load_config(sys.argv[1], [sys.argv[2].replace("tests", "'not/a/name'")])
(folder.path / "refused").mkdir()
(third,) = tracker_logs(refused, RunFolder(folder.path / "refused"), 0, print)
with third as log:
    log.write(0, {"eval/accuracy": 0.25})
"""


@pytest.fixture(scope="module")
def started_twice(tmp_path_factory) -> tuple[Path, str]:
    """(run folder, what the process that wrote into it has printed)."""
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("run")
    return folder, python("-c", TWO_STARTS, QUICKSTART, PROJECT, folder, env=child_environment(OFFLINE))


def records(path: Path) -> Iterator:
    """wandb's own messages in a .wandb file: LevelDB's log format, blocks of 32 KiB after 7 bytes of wandb's own."""
    proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    content, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        if kind == 0:  # the rest of a block
            at = (at // 32768 + 1) * 32768
            continue
        message += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield proto.Record.FromString(message)
            message = b""


def history(path: Path) -> list[dict]:
    """The logged entries, without wandb's own keys."""
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    return rows


def test_two_starts_are_one_run_with_the_entries_of_metrics_jsonl(started_twice):
    folder, _ = started_twice
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) == 2
    assert {path.stem for path in files} == {f"run-{(folder / 'wandb_id').read_text()}"}
    first, resumed = map(history, files)
    assert first[0] == {"step": 0, "eval/accuracy": 0.25} and first[2] == {"step": 2, "reward/mean": 0.625}
    assert first[1]["reward/mean"] == 0.5 and not math.isfinite(float(first[1]["optim/grad_norm"]))
    assert resumed == [{"step": 2, "reward/mean": 0.75}]
    # the run has its project, its configuration and its end
    found = [{record.WhichOneof("record_type"): record for record in records(path)} for path in files]
    run = found[0]["run"].run
    assert (run.project, run.display_name) == ("tests", "quickstart")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    expected = load_config(QUICKSTART, [PROJECT]).model_dump(mode="json")
    assert {name: config[name] for name in expected} == expected
    assert [one["exit"].exit.exit_code for one in found] == [0, 1], "the second was ended by an error"


def test_it_ends_at_once_leaves_no_process_and_is_never_fatal(started_twice):
    pid, *lines = started_twice[1].splitlines()
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    # its command line has its owner's id
    assert [words for words in commands if "wandb-core" in " ".join(words) and pid in words] == []
    assert len(lines) == 1 and "the start failed; no more metrics are sent; metrics.jsonl has all of them" in lines[0]


class Played:
    """A tracker of the user's, which fails at the second step."""

    calls: ClassVar[list[object]] = []

    def __init__(self, colour: str):
        self.colour = colour

    def start(self, run: TrackedRun) -> str:
        self.calls.append((self.colour, run.name, run.continued, run.id if run.continued else ""))
        return "its own id"

    def log(self, step: int, values: dict[str, float]) -> None:
        self.calls.append(values)
        if step == 2:
            raise ConnectionError("the service is gone")

    def finish(self, failed: bool) -> None:
        self.calls.append(failed)


OWN = "log.trackers=[{name: 'tests.unit.test_trackers:Played', args: {colour: red}}]"


def test_a_class_of_the_users_continues_its_run_and_a_failure_is_said_once(tmp_path, prepared):
    from tests.unit.test_trackers import Played as Loaded

    calls, said = Loaded.calls, []
    config, folder = load_config(QUICKSTART, [OWN]), RunFolder(tmp_path)
    assert preflight(config) == []
    assert list(tracker_logs(load_config(QUICKSTART), folder, 0, said.append)) == []
    (log,) = tracker_logs(config, folder, 0, said.append)
    with log:
        log.write(1, {"reward/mean": 0.5})
    assert calls == [("red", "quickstart", False, ""), {"reward/mean": 0.5}, False]
    calls.clear()
    with pytest.raises(KeyError), next(tracker_logs(config, folder, 1, said.append)) as log:
        raise KeyError("the rank fails")
    assert calls == [("red", "quickstart", True, "its own id"), True]
    calls.clear()
    with next(tracker_logs(config, folder, 1, said.append)) as log:
        for step in (2, 3):
            log.write(step, {"reward/mean": 0.5})
    assert len(calls) == 2 and len(said) == 1, "nothing is sent after a failure"
    assert "sending step 2 failed" in said[0] and "ConnectionError: the service is gone" in said[0]


class Silent(Played):
    """Its service takes a connection and never answers."""

    answers = threading.Event()

    def log(self, step: int, values: dict[str, float]) -> None:
        self.answers.wait()


def test_no_step_waits_for_a_tracker_that_does_not_answer(tmp_path, monkeypatch):
    from tests.unit.test_trackers import Silent as Loaded

    monkeypatch.setattr(trackers, "_END_S", 0.1)
    said = []
    (log,) = tracker_logs(
        load_config(QUICKSTART, [OWN.replace("Played", "Silent")]), RunFolder(tmp_path), 0, said.append
    )
    values = {"reward/mean": 0.5}
    # in a thread, so that this test fails where it would hang
    steps = threading.Thread(target=lambda: [log.write(step, values) for step in range(3)], daemon=True)
    with log:
        steps.start()
        steps.join(10)
        assert not steps.is_alive()
    Loaded.answers.set()
    assert len(said) == 1 and "it does not answer; the run ends" in said[0]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("[{name: mlfow}]", "log.trackers.name 'mlfow' is unknown; did you mean 'mlflow'?"),
        ("[{name: mlflow, args: {projekt: x}}]", "log.trackers.args do not fit 'mlflow'"),
        ("[{name: 'tests.unit.test_trackers:Paled'}]", "has no function Paled; did you mean 'Played'?"),
    ],
)
def test_a_tracker_that_cannot_be_made_is_refused_before_the_run(given, problem, prepared):
    found = preflight(load_config(QUICKSTART, [f"log.trackers={given}"]))
    assert any(problem in text for text in found), found


def test_a_tracker_named_twice_is_refused(prepared):
    twice = "log.trackers=[{name: trackio, args: {project: a}}, {name: trackio, args: {project: b}}]"
    with pytest.raises(ValueError, match="trackers names trackio twice"):
        load_config(QUICKSTART, [twice])


TWO_STARTS_OF_ANY = """
import sys
from pathlib import Path
from megagrpo.config.load import load_config
from megagrpo.monitor import trackers
from megagrpo.monitor.trackers import tracker_logs
from megagrpo.system.run_folder import RunFolder

config, folder = load_config(sys.argv[1], [sys.argv[2]]), RunFolder(Path(sys.argv[3]))
for start, steps in ((0, (1, 2)), (1, (2, 3))):
    (log,) = tracker_logs(config, folder, start, print)
    with log:
        for step in steps:
            log.write(step, {"reward/mean": (start + step) / 8})
"""


def two_starts(name: str, folder: Path, **variables: str) -> None:
    pytest.importorskip(name)
    given = f"log.trackers=[{{name: {name}, args: {{project: tests}}}}]"
    said = python("-c", TWO_STARTS_OF_ANY, QUICKSTART, given, folder, env=child_environment(variables))
    assert "failed" not in said, said


def test_mlflow_holds_both_starts_in_one_run(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    two_starts("mlflow", tmp_path, MLFLOW_TRACKING_URI=uri, MLFLOW_ARTIFACT_ROOT=str(tmp_path))
    client = importlib.import_module("mlflow").MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "quickstart"
    kept = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "reward/mean")]
    assert sorted(kept) == [(1, 0.125), (2, 0.25), (2, 0.375), (3, 0.5)]


def test_trackio_holds_both_starts_in_one_run(tmp_path):
    two_starts("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    (database,) = (tmp_path / "trackio").glob("tests*.db")
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    kept = [(step, json.loads(metrics)["reward/mean"]) for _, step, metrics in rows]
    assert kept == [(1, 0.125), (2, 0.25), (2, 0.375), (3, 0.5)]


def test_swanlab_keeps_an_offline_run_in_the_run_folder(tmp_path):
    two_starts("swanlab", tmp_path, SWANLAB_MODE="offline")
    identity = (tmp_path / "swanlab_id").read_text()
    assert any(identity in path.name for path in (tmp_path / "swanlab").rglob("*")), identity


def test_check_wants_the_package_where_it_is_used(monkeypatch, prepared):
    monkeypatch.setattr("megagrpo.check.rules.inputs.find_spec", lambda name: None)
    assert preflight(load_config(QUICKSTART)) == []
    (problem,) = preflight(load_config(QUICKSTART, [PROJECT]))
    assert problem.startswith("log.wandb: the package wandb is not installed; `pip install wandb`")
