"""Which line of a stack the page about a hang calls ours."""

import threading
from pathlib import Path

from megagrpo.monitor import watchdog


def test_libraries_inside_a_clone_and_the_interpreters_own_frames_are_not_ours(tmp_path: Path, monkeypatch):
    """A clone as `git clone` makes it, with its environment: all its files are below a folder named megagrpo."""
    clone = tmp_path / "megagrpo"
    monkeypatch.setattr(watchdog, "_PACKAGE", clone / "megagrpo")
    assert watchdog.is_ours(str(clone / "megagrpo" / "mesh.py"))
    library = clone / ".venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    for file in (library, clone / "tests" / "conftest.py", "<frozen runpy>", threading.__file__):
        assert not watchdog.is_ours(str(file))


def test_the_package_itself_is_found_through_a_link(tmp_path: Path):
    link = tmp_path / "somewhere else"
    link.symlink_to(Path(watchdog.__file__).parent)
    assert watchdog.is_ours(str(link / "watchdog.py"))
