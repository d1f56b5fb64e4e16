"""log.wandb with the real package, offline: what the file holds, one run over two starts, nothing left, never fatal."""

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megagrpo.check.problems import preflight
from megagrpo.config.load import load_config
from megagrpo.monitor.wandb_log import WandbLog
from megagrpo.system.environment import child_environment
from megagrpo.system.run_folder import RunFolder
from tests.experiments import QUICKSTART, python

pytestmark = pytest.mark.verifies("runs", "W&B's offline mode")

PROJECT = "log.wandb={project: tests}"
OFFLINE = {"WANDB_MODE": "offline"}
TWO_STARTS = """
import os, sys
from pathlib import Path
from megagrpo.config.load import load_config
from megagrpo.monitor.wandb_log import WandbLog
from megagrpo.system.run_folder import RunFolder

print(os.getpid())
config, folder = load_config(sys.argv[1], [sys.argv[2]]), RunFolder(Path(sys.argv[3]))
with WandbLog(config, folder, 0, print) as log:
    log.write(0, {"eval/accuracy": 0.25})
    log.write(1, {"reward/mean": 0.5, "optim/grad_norm": float("inf")})
    log.write(2, {"reward/mean": 0.625})
try:
    with WandbLog(config, folder, 1, print) as log:  # resumed from the checkpoint of step 1
        log.write(2, {"reward/mean": 0.75})
        raise KeyError("the rank fails")
except KeyError:
    pass
refused = load_config(sys.argv[1], [sys.argv[2].replace("tests", "'not/a/name'")])
with WandbLog(refused, RunFolder(folder.path / "refused"), 0, print) as log:
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


def test_a_failure_while_sending_is_said_once_and_nothing_more_is_sent(tmp_path):
    class Gone:
        calls = 0

        def log(self, values: dict) -> None:
            self.calls += 1
            raise ConnectionError("the service is gone")

    said: list[str] = []
    log = WandbLog(load_config(QUICKSTART), RunFolder(tmp_path), 0, said.append)
    log.write(0, {"eval/accuracy": 0.5})  # without log.wandb nothing happens
    log._run = gone = Gone()
    for step in (1, 2):
        log.write(step, {"reward/mean": 0.5})
    assert gone.calls == 1 and len(said) == 1
    assert said[0].startswith("log.wandb: sending step 1 failed") and "ConnectionError: the service is gone" in said[0]


def test_check_wants_the_package_where_it_is_used(monkeypatch, prepared):
    monkeypatch.setattr("megagrpo.check.rules.inputs.find_spec", lambda name: None)
    assert preflight(load_config(QUICKSTART)) == []
    (problem,) = preflight(load_config(QUICKSTART, [PROJECT]))
    assert problem.startswith("log.wandb: the package wandb is not installed; `pip install wandb`")
