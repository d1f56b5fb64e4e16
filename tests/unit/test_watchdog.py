"""What the watchdog asks of a shared file system, and what a full one leaves."""

from types import SimpleNamespace

import pytest

from megagrpo.monitor import watchdog
from megagrpo.monitor.watchdog import Watchdog
from megagrpo.system.run_folder import RunFolder
from tests.experiments import experiment


@pytest.fixture
def dog(tmp_path) -> Watchdog:
    mesh = SimpleNamespace(rank=0, world_size=1, gather_world=lambda value: [value])
    folder = RunFolder(tmp_path)
    folder.ranks.mkdir(parents=True)
    return Watchdog(experiment(), mesh, folder, lambda: 3)


def test_a_page_that_cannot_be_written_leaves_no_request(dog, monkeypatch):
    write = watchdog.write_whole

    def full(path, text):
        if path.name.startswith("deadline_"):
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(watchdog, "write_whole", full)
    with pytest.raises(OSError, match="No space"):
        dog._write_page(0.0)
    assert not dog._request.exists()
    monkeypatch.undo()
    dog._write_page(0.0)
    assert len(dog._folder.deadline_pages()) == 1 and not dog._request.exists()


def test_a_request_is_looked_for_with_a_heartbeat(dog, monkeypatch):
    looks = []
    dog._request = SimpleNamespace(exists=lambda: bool(looks.append(1)))
    start = dog._since
    for poll in range(41):  # 20 s
        dog._look(start + poll / 2)
    assert 3 <= len(looks) <= 5
