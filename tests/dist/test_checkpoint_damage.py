"""One message on every rank says what is wrong with a checkpoint, before a weight is touched; old ones stay whole."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.dist.workers.launch import run_ranks

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def healthy(hf_models: Path, tmp_path_factory) -> tuple[Path, Path]:
    """A model and a checkpoint of it by one rank after one update."""
    folder = tmp_path_factory.mktemp("damage")
    job = {
        "model": str(hf_models / "qwen3"),
        "do": "checkpoint",
        "warm": 1,
        "save": str(folder / "run"),
        "then": str(folder / "then.pt"),
    }
    run_ranks(1, folder / "save", [job])
    return hf_models / "qwen3", folder / "run" / "step_000001"


def corrupt(folder: Path) -> str:
    file = max((folder / "actor").rglob("*.distcp"), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return f"{file} is corrupt: its CRC-32 differs from the manifest"


def cut_short(folder: Path) -> str:
    file = max((folder / "actor").rglob("*.distcp"), key=lambda f: f.stat().st_size)
    size = file.stat().st_size
    os.truncate(file, size - 10)
    return f"{file} has {size - 10} bytes, its manifest says {size}"


def lose_a_file(folder: Path) -> str:
    file = folder / "actor" / "metadata.json"
    file.unlink()
    return f"checkpoint file {file} is missing"


def half_written(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return f"checkpoint {folder} has no manifest.json: it is not a checkpoint, or its save was interrupted"


def broken_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:40])
    return f"checkpoint {folder}: manifest.json or state.json is not readable"


DAMAGES = {f.__name__: f for f in (corrupt, cut_short, lose_a_file, half_written, broken_manifest)}


def test_damage_is_named(healthy: tuple[Path, Path], tmp_path: Path):
    model, good = healthy
    base = {"model": str(model), "do": "refusal"}
    jobs, expected = [], []
    for name, damage in DAMAGES.items():
        folder = tmp_path / name / "step_000001"
        shutil.copytree(good, folder)
        shutil.copytree(good, folder.with_name("step_000000"))
        expected.append(damage(folder))
        jobs.append({**base, "load": str(folder)})
    jobs.append({**base, "load": str(good), "identity": {"model": "another"}})
    expected.append(f"checkpoint {good} is of another model: model: checkpoint 'qwen3', this run 'another'")
    jobs.append({**base, "load": str(tmp_path / "nowhere")})
    expected.append(f"checkpoint {tmp_path / 'nowhere'} has no manifest.json")
    for result, text in zip(run_ranks(2, tmp_path / "ranks", jobs), expected, strict=True):
        assert [text in message for message in result["messages"]] == [True, True], (text, result["messages"])
        assert all("\n" not in message for message in result["messages"]), "one line"
        older = "rename it to step_000001.old: step_000000 beside it can be loaded"
        assert (older in result["messages"][0]) == any(name in text for name in DAMAGES), text
        assert result["untouched"]


def test_an_architecture_that_does_not_fit_is_named(healthy: tuple[Path, Path], hf_models: Path, tmp_path: Path):
    """Even where the identity was written wrongly."""
    job = {"model": str(hf_models / "qwen2"), "do": "refusal", "load": str(healthy[1]), "identity": {"model": "qwen3"}}
    result = run_ranks(1, tmp_path / "ranks", [job])[0]
    assert f"checkpoint {healthy[1] / 'actor'} does not fit this model and layout" in result["messages"][0]
    assert len(result["messages"][0]) < 600


@pytest.fixture
def small_disk(tmp_path: Path, healthy: tuple[Path, Path]):
    """A file system with room for little more than one checkpoint."""
    size = sum(file.stat().st_size for file in healthy[1].rglob("*") if file.is_file())
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(size * 1.15)}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_disk_full_leaves_the_older_checkpoint(healthy: tuple[Path, Path], small_disk: Path, tmp_path: Path):
    model, good = healthy
    older = small_disk / "run" / "step_000001"
    shutil.copytree(good, older)
    before = {file.relative_to(older): file.read_bytes() for file in older.rglob("*") if file.is_file()}
    base = {"model": str(model), "do": "refusal"}
    save = {**base, "save": str(older.parent), "step": 2}
    files = (".metadata", "metadata.json")  # which rank 0 alone writes
    jobs = [save, *({**save, "full": file, "save": str(tmp_path / file)} for file in files)]
    first, *others = run_ranks(2, tmp_path / "ranks", jobs)
    for message in first["messages"]:
        assert "step_000002: rank 0 could not write, 0 MiB are free there" in message, message
        assert "Traceback" not in message
    for file, result in zip(files, others, strict=True):
        assert len(set(result["messages"])) == 1, (file, result["messages"])
        assert "rank 0 could not write" in result["messages"][0]
        assert "No space left" in result["messages"][0]
        assert not list((tmp_path / file).iterdir()), "no partial folder is left"
    assert [path.name for path in older.parent.iterdir()] == ["step_000001"], "no partial folder is left"
    assert {file.relative_to(older): file.read_bytes() for file in older.rglob("*") if file.is_file()} == before
    assert json.loads((older / "state.json").read_text())["train"]["data_cursor"] == 17
