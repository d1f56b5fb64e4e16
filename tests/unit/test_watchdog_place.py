"""Which line of a stack the page about a hang calls ours."""

import threading
from pathlib import Path

import pytest

from megagrpo.monitor import watchdog


@pytest.fixture
def clone(tmp_path: Path, monkeypatch) -> Path:
    """A clone as `git clone` makes it, the environment inside: all files in it lie below a folder named megagrpo."""
    root = tmp_path / "megagrpo"
    monkeypatch.setattr(watchdog, "_PACKAGE", root / "megagrpo")
    return root


def test_libraries_inside_a_clone_are_not_ours(clone: Path):
    assert watchdog.is_ours(str(clone / "megagrpo" / "mesh.py"))
    assert not watchdog.is_ours(str(clone / ".venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"))
    assert not watchdog.is_ours(str(clone / "tests" / "conftest.py"))


def test_an_interpreter_frame_without_a_file_is_not_ours(clone: Path):
    assert not watchdog.is_ours("<frozen runpy>")
    assert not watchdog.is_ours(threading.__file__)


def test_the_package_itself_is_found_through_a_link(tmp_path: Path):
    link = tmp_path / "somewhere else"
    link.symlink_to(Path(watchdog.__file__).parent)
    assert watchdog.is_ours(str(link / "watchdog.py"))
