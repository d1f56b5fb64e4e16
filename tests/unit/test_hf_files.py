"""HF folders: written whole or not at all, read back bit by bit, and every kind of damage named."""

import json
import os
import subprocess
from itertools import chain

import pytest
import torch

from megagrpo.weights import hf_folder as hf_files
from megagrpo.weights.hf_folder import INDEX, SINGLE, HfFolder, ReadingProgress, write_hf_folder

TENSORS = {"x": torch.randn(4, 3), "y": torch.randn(5), "z": torch.tensor(1.5)}


@pytest.fixture
def like(tmp_path):
    folder = tmp_path / "like"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "dtype": "float32"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / SINGLE).write_bytes(b"old weights")
    return folder


def shards(number):
    names = list(TENSORS)
    return iter([{n: TENSORS[n] for n in names[i::number]} for i in range(number)])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_round_trip(tmp_path, like, number):
    size = write_hf_folder(tmp_path / "out", shards(number), like, torch.float32)
    folder = HfFolder(tmp_path / "out")
    assert size == sum(t.numel() * 4 for t in TENSORS.values())
    assert set(folder) == set(TENSORS) and folder.specs["x"] == ((4, 3), torch.float32)
    assert all(torch.equal(folder[n], t) for n, t in TENSORS.items())
    assert (tmp_path / "out" / INDEX).exists() == (number > 1)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["like", "out"], "nothing temporary stays"


def test_the_dtype_is_written_into_the_config_and_tensors_keep_their_own(tmp_path, like):
    kept = {"bias": torch.ones(3)}
    half = ({name: tensor.bfloat16() for name, tensor in shard.items()} for shard in shards(2))
    write_hf_folder(tmp_path / "out", chain(half, [kept]), like, torch.bfloat16)
    specs = HfFolder(tmp_path / "out").specs
    assert specs["y"] == ((5,), torch.bfloat16) and specs["bias"] == ((3,), torch.float32)
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"model_type": "toy", "dtype": "bfloat16"}


def test_a_failure_leaves_the_old_folder_and_nothing_else(tmp_path, like):
    write_hf_folder(tmp_path / "out", shards(1), like, torch.float32)

    def broken():
        yield {"x": torch.zeros(4, 3)}
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match=r"a rank died"):
        write_hf_folder(tmp_path / "out", broken(), like, torch.float32)
    assert torch.equal(HfFolder(tmp_path / "out")["x"], TENSORS["x"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["like", "out"]


def test_views_of_one_storage_are_written_as_their_own(tmp_path, like):
    flat = torch.arange(10.0)
    write_hf_folder(tmp_path / "out", iter([{"a": flat[:4], "b": flat.view(5, 2).t()}]), like, torch.float32)
    assert torch.equal(HfFolder(tmp_path / "out")["b"], flat.view(5, 2).t())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_disk_full_is_one_clear_error_and_leaves_nothing(tmp_path, like):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(OSError, match=r"cannot write the checkpoint .*out"):
            write_hf_folder(
                small / "out", iter([{"x": torch.zeros(10)}, {"big": torch.zeros(1 << 20)}]), like, torch.float32
            )
        assert not list(small.iterdir())
    finally:
        subprocess.run(["umount", small], check=True)


def test_damage_is_named(tmp_path, like):
    with pytest.raises(ValueError, match=r"nowhere: no such folder"):
        HfFolder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"unreadable or cut short"):
        HfFolder(like)
    out = tmp_path / "out"
    write_hf_folder(out, shards(2), like, torch.float32)
    first = out / "model-00001-of-00002.safetensors"
    whole = first.read_bytes()
    first.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=r"model-00001-of-00002.safetensors: unreadable or cut short"):
        HfFolder(out)
    first.unlink()
    with pytest.raises(ValueError, match=r"missing, but model.safetensors.index.json names it"):
        HfFolder(out)
    first.write_bytes((out / "model-00002-of-00002.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"lacks"):
        HfFolder(out)
    (out / INDEX).write_text("{")
    with pytest.raises(ValueError, match=r"not a safetensors index"):
        HfFolder(out)
    (out / INDEX).unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor"):
        HfFolder(out)


def test_reading_a_large_model_says_how_far_it_is(monkeypatch, capsys):
    now = iter([0.0, 1.0, 7.0, 8.0, 20.0])
    monkeypatch.setattr(hf_files.time, "monotonic", lambda: next(now))
    progress = ReadingProgress(2_000_000_000)
    for read in range(4):
        progress.show(read * 500_000_000)
    assert capsys.readouterr().out.splitlines() == [
        "reading the model [######------------------] 0.5 of 2.0 GB a rank, 7 s, 21 s left",
        "reading the model [##################------] 1.5 of 2.0 GB a rank, 20 s, 7 s left",
    ]


def test_reading_a_small_model_says_nothing(tmp_path, like, capsys):
    write_hf_folder(tmp_path / "out", shards(2), like, torch.float32)
    folder, progress = HfFolder(tmp_path / "out"), ReadingProgress(48)
    target = torch.zeros(2, 2, dtype=torch.float64)
    folder.read_into(target, "x", (1, 0))
    progress.show(folder.bytes_read)
    assert torch.equal(target, TENSORS["x"][1:3, :2].double())
    assert folder.bytes_read == 16 and folder.stored_bytes("x", (2, 2)) == 16
    assert capsys.readouterr().out == ""
