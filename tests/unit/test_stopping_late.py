"""Stop requests and grants that come while a launcher starts, fails or ends its children."""

import signal
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from megagrpo.cluster import supervise
from megagrpo.cluster.supervise import Launch
from megagrpo.loop.run import Run
from megagrpo.mesh import RunStopped
from megagrpo.rollout.batches import SampledBatch, SamplingJob
from megagrpo.rollout.generation import SamplingParams
from megagrpo.system.run_folder import RunFolder
from megagrpo.system.stop_request import STOPPED, StopRequest
from megagrpo.types import TrainState

# Ranks that save and grant while they are ended.
_LATE = """trap 'printf "saved after step 3" > "$2"; exit 0' TERM; touch "$1"; while :; do sleep 0.1; done"""


@pytest.mark.parametrize("error", [None, OSError(116, "Stale file handle")])
def test_what_ranks_grant_while_they_are_ended_decides_the_status(error, tmp_path, capsys):
    """The service ends, or the launcher fails, between the request and the grant."""
    folder = RunFolder(tmp_path)
    up = tmp_path / "up"
    granted = folder.stop_request("trainer").with_suffix(".stop_granted")
    with Launch(folder, "train", end=(), ask=(signal.SIGUSR1,), grace_s=60) as launch:
        service = launch.spawn(
            ["sh", "-c", f"until [ -e {up} ]; do sleep 0.1; done; exit 3"], folder.log("service"), {}
        )
        ranks = launch.spawn(["sh", "-c", _LATE, "sh", str(up), str(granted)], tmp_path / "log", {})
        signal.raise_signal(signal.SIGUSR1)
        launch.status = launch.watch(ranks, service)
        if error:
            raise error
    assert launch.status == STOPPED
    said = capsys.readouterr().err
    assert "service ended with status 3" in said and "saved after step 3" in said
    assert ("megagrpo train: OSError(116, 'Stale file handle')" in said) == (error is not None)


def test_a_grant_that_cannot_be_read_decides_the_status(tmp_path):
    request = StopRequest(tmp_path / "trainer.stop_request")
    request.grant(3, final=False)
    assert request.granted() == ("saved after step 3", STOPPED)
    (tmp_path / "trainer.stop_granted").unlink()
    (tmp_path / "trainer.stop_granted").mkdir()  # reading it raises an OSError, as ESTALE is
    assert request.granted() == ("saved", STOPPED)


def test_a_batch_ends_when_the_exchange_fails():
    def publish(*_: object) -> None:
        raise RunStopped("an engine has other weights")

    batch = SampledBatch(SamplingJob("train", 0, 0, SamplingParams(1.0, 4), 1), work=Future())
    source = SimpleNamespace(wait=lambda *_: ["engine-0"])
    run = SimpleNamespace(state=TrainState(), source=source, exchange=SimpleNamespace(publish=publish))
    with pytest.raises(RunStopped, match="other weights"):
        Run._groups(run, batch)
    assert batch.work.cancelled()


def test_a_full_disk_does_not_hide_why_a_run_stopped():
    def log(*entry: object) -> None:
        raise OSError(28, "No space left on device")

    run = SimpleNamespace(recording=SimpleNamespace(log=log), state=TrainState())
    with pytest.raises(RunStopped, match="too few groups"), ExitStack() as end:
        end.callback(Run.log, run, {})
        raise RunStopped("too few groups")
    with pytest.raises(OSError, match="No space"):
        Run.log(run, {})


def test_a_shared_folder_that_fails_for_a_moment_ends_no_run(tmp_path, monkeypatch, capsys):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    monkeypatch.setattr(supervise, "_LOOK_S", 0.0)
    look = RunFolder.deadline_pages
    looks = 0

    def stale(self: RunFolder) -> set[Path]:
        nonlocal looks
        looks += 1
        if 1 < looks < 5:
            raise OSError(116, "Stale file handle")
        if looks == 5:
            folder.deadline_page("now").write_text("it hangs")
            (tmp_path / "go").touch()
        return look(self)

    monkeypatch.setattr(RunFolder, "deadline_pages", stale)
    with Launch(folder, "train", end=()) as launch:
        code = f"until [ -e {tmp_path / 'go'} ]; do sleep 0.1; done"
        assert launch.watch(launch.spawn(["sh", "-c", code], folder.log("trainer"), {})) == 0
    said = capsys.readouterr().err
    assert said.count("unread, looks again: [Errno 116] Stale file handle") == 1
    assert f"it hangs\nstacks: {folder.deadline_page('now')}" in said


@pytest.mark.parametrize("number", range(4))
def test_a_stop_while_a_launcher_starts_is_withdrawn_whole_or_stands_whole(number, tmp_path, monkeypatch):
    request = StopRequest(tmp_path / "trainer.stop_request")
    request.grant(3, final=True)
    unlink = Path.unlink
    count = 0

    def meanwhile(path: Path, missing_ok: bool = False) -> None:
        nonlocal count
        if count == number:
            request.make(final=True)
        unlink(path, missing_ok)
        count += 1

    monkeypatch.setattr(Path, "unlink", meanwhile)
    request.withdraw()
    assert request.made() == request.final() and request.granted() is None


def test_a_launcher_that_starts_during_a_stop_withdraws_it_whole(tmp_path, monkeypatch):
    request = StopRequest(tmp_path / "trainer.stop_request")
    touch = Path.touch
    started = list[Path]()

    def meanwhile(path: Path) -> None:
        touch(path)
        if not started:
            started.append(path)
            request.withdraw()

    monkeypatch.setattr(Path, "touch", meanwhile)
    request.make(final=True)
    assert started and request.made() == request.final()
