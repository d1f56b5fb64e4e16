"""HF folders: written whole or not at all, read back bit by bit, and every kind of damage named."""

import json
import os
import shutil
import subprocess
from collections import Counter
from functools import partial

import pytest
import torch

from examples.laptop.model import character_tokenizer
from megagrpo.mesh import make_mesh
from megagrpo.weights import hf_export, hf_folder
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.copies.recorder import record_whole
from megagrpo.weights.hf_export import export_hf, take_tokenizer
from megagrpo.weights.hf_folder import INDEX, SINGLE, HfFolder, ReadingProgress, write_hf_folder
from tests.experiments import experiment

TENSORS = {"x": torch.randn(4, 3), "y": torch.randn(5), "z": torch.tensor(1.5)}


@pytest.fixture
def like(tmp_path):
    folder = tmp_path / "like"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "dtype": "float32"}))
    (folder / "tokenizer.json").write_text("{}")
    for name in (SINGLE, "old.gguf", "tf_model.h5", "consolidated.00.pth"):
        (folder / name).write_bytes(b"old weights")
    return folder


@pytest.fixture
def small_files(monkeypatch):
    """A file for each dict of tensors."""
    monkeypatch.setattr(hf_folder, "_FILE_BYTES", 1)


def shards(number):
    names = list(TENSORS)
    return iter([{n: TENSORS[n] for n in names[i::number]} for i in range(number)])


def test_small_buckets_share_files(tmp_path, like, monkeypatch):
    """Rank 0 gathers in small buckets, but a folder of a large model has no thousands of files."""
    monkeypatch.setattr(hf_folder, "_FILE_BYTES", 100)
    buckets = [{f"w{number}": torch.full((10,), float(number))} for number in range(7)]  # of 40 bytes
    write_hf_folder(tmp_path / "out", iter(buckets), like, torch.float32)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert sorted(Counter(index["weight_map"].values()).values()) == [1, 3, 3]
    assert index["metadata"]["total_size"] == 280
    folder = HfFolder(tmp_path / "out")
    assert all(torch.equal(folder[name], values) for bucket in buckets for name, values in bucket.items())


def test_an_export_stages_as_much_as_a_publish(tmp_path, like, monkeypatch):
    """Rank 0 holds four buckets."""
    live = {"flat": torch.arange(64.0)}
    specs = {f"w{number}": ((8,), torch.float32) for number in range(8)}

    def load(hf) -> None:
        for number, name in enumerate(specs):
            live["flat"][8 * number : 8 * number + 8].copy_(hf[name])

    weights = ActorWeights(record_whole(load, specs, live).copies, specs, lambda: live)
    config = experiment(actor={"dtype": "bfloat16"}, weights={"bucket_mb": 4 * 32 / 2**20})
    sizes = []

    def write(target, tensors, *args, **options) -> None:
        sizes.extend(sum(t.nbytes for t in bucket.values()) for bucket in tensors)

    monkeypatch.setattr(hf_export, "write_hf_folder", write)
    mesh = make_mesh(0, 1, torch.device("cpu"), deadline_s=30)
    export_hf(tmp_path / "out", weights, mesh, config, str(like))
    assert sizes == [32] * 4
    monkeypatch.undo()
    export_hf(tmp_path / "out", weights, mesh, config, str(like))
    folder = HfFolder(tmp_path / "out")
    assert torch.equal(torch.cat([folder[name] for name in specs]), live["flat"].bfloat16())
    assert (tmp_path / "out" / SINGLE).exists()


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.usefixtures("small_files")
def test_round_trip(tmp_path, like, number):
    write_hf_folder(tmp_path / "out", shards(number), like, torch.float32)
    folder = HfFolder(tmp_path / "out")
    if number > 1:
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in TENSORS.values())
    assert set(folder) == set(TENSORS) and folder.specs["x"] == ((4, 3), torch.float32)
    assert all(torch.equal(folder[n], t) for n, t in TENSORS.items())
    assert (tmp_path / "out" / INDEX).exists() == (number > 1)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not any(p.read_bytes() == b"old weights" for p in (tmp_path / "out").iterdir())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["like", "out"], "nothing temporary stays"


def test_an_export_has_every_chat_template(tmp_path, like):
    """transformers saves a tokenizer's further ones, as for tools, in a folder."""
    tokenizer, other = character_tokenizer("01"), tmp_path / "other"
    for folder, name in ((like, "tool_use"), (other, "rag")):
        tokenizer.chat_template = {"default": "plain", name: "more"}
        tokenizer.save_pretrained(folder)
    for source in (like, other):
        finish = partial(take_tokenizer, source=source)
        write_hf_folder(tmp_path / "out", shards(1), like, torch.float32, finish=finish)
        found = type(tokenizer).from_pretrained(tmp_path / "out").chat_template
        assert found == type(tokenizer).from_pretrained(source).chat_template and len(found) == 2


def test_a_tokenizer_of_its_own_replaces_that_of_the_model(tmp_path, like):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer_config.json", "chat_template.jinja", "vocab.json"):
        (like / name).write_text("{}")
    (like / "generation_config.json").write_text('{"eos_token_id": 7, "temperature": 0.6}')
    character_tokenizer("01").save_pretrained(other)
    for name in ("special_tokens_map.json", "config.json", "notes.txt"):
        (other / name).write_text("its own")
    (other / "tokenizer_backup").mkdir()
    write_hf_folder(tmp_path / "out", shards(1), like, torch.float32, finish=lambda draft: take_tokenizer(draft, other))
    own = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert all((tmp_path / "out" / name).read_bytes() == (other / name).read_bytes() for name in own)
    rest = {file.name for file in (tmp_path / "out").iterdir()} - own
    assert rest == {SINGLE, "config.json", "generation_config.json"}
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"model_type": "toy", "dtype": "float32"}
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 7], "temperature": 0.6}


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({}, None, [2]),
        ({"eos_token_id": 5}, None, [2, 5]),
        ({"text_config": {"eos_token_id": [5, 2]}}, None, [2, 5]),
        ({"eos_token_id": 2}, {"eos_token_id": 2}, 2),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, [7, 2]),
        ({"eos_token_id": 5}, {"eos_token_id": None, "top_k": 3}, [2, 5]),
    ],
)
def test_an_export_names_the_end_tokens_of_the_run(tmp_path, like, config, generation, ends):
    character_tokenizer("01").save_pretrained(like)
    (like / "config.json").write_text(json.dumps({"model_type": "toy", **config}))
    if generation is not None:
        (like / "generation_config.json").write_text(json.dumps(generation))
    write_hf_folder(tmp_path / "out", shards(1), like, torch.float32, finish=lambda draft: take_tokenizer(draft, like))
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {**(generation or {}), "eos_token_id": ends}


def test_tensors_keep_their_dtype_and_views_of_one_storage_and_the_config_names_the_dtype(tmp_path, like):
    flat, half = torch.arange(10.0), torch.ones(5, dtype=torch.bfloat16)
    tensors = {"half": half, "bias": flat[:4], "view": flat.view(5, 2).t()}
    write_hf_folder(tmp_path / "out", iter([tensors]), like, torch.bfloat16)
    folder = HfFolder(tmp_path / "out")
    assert folder.specs["half"] == ((5,), torch.bfloat16) and folder.specs["bias"] == ((4,), torch.float32)
    assert torch.equal(folder["view"], flat.view(5, 2).t())
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


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_disk_full_is_one_clear_error_and_leaves_nothing(tmp_path, like):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(OSError, match=r"cannot write the checkpoint .*out"):
            shards = iter([{"x": torch.zeros(10)}, {"big": torch.zeros(1 << 20)}])
            write_hf_folder(small / "out", shards, like, torch.float32)
        assert not list(small.iterdir())
    finally:
        subprocess.run(["umount", small], check=True)


FIRST, SECOND = (f"model-0000{k}-of-00002.safetensors" for k in (1, 2))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda out: shutil.rmtree(out), "out: no such folder"),
        (lambda out: (out / FIRST).write_bytes(b"old weights"), f"{FIRST}: unreadable or cut short"),
        (lambda out: (out / FIRST).write_bytes((out / FIRST).read_bytes()[:-4]), f"{FIRST}: unreadable or cut short"),
        (lambda out: (out / FIRST).unlink(), f"{FIRST}: missing, but {INDEX} names it"),
        (lambda out: (out / FIRST).write_bytes((out / SECOND).read_bytes()), f"{FIRST}: lacks .* that {INDEX} names"),
        (lambda out: (out / INDEX).write_text("{"), f"{INDEX}: not a safetensors index"),
        *(
            (lambda out, text=text: (out / INDEX).write_text(text), f"{INDEX}: not a safetensors index")
            for text in ("{}", "[]", "3", '{"weight_map": []}')
        ),
        (lambda out: (out / INDEX).unlink(), "out: has neither model.safetensors nor"),
    ],
)
@pytest.mark.usefixtures("small_files")
def test_damage_is_named(tmp_path, like, damage, named):
    write_hf_folder(tmp_path / "out", shards(2), like, torch.float32)
    damage(tmp_path / "out")
    with pytest.raises(ValueError, match=named):
        HfFolder(tmp_path / "out")


def test_reading_a_large_model_says_how_far_it_is(monkeypatch, capsys):
    now = iter([0.0, 1.0, 7.0, 8.0, 20.0])
    monkeypatch.setattr(hf_folder.time, "monotonic", lambda: next(now))
    progress = ReadingProgress(2_000_000_000)
    for read in range(4):
        progress.show(read * 500_000_000)
    assert capsys.readouterr().out.splitlines() == [
        "reading the model: 0.5 of 2.0 GB a rank, 7 s, 21 s left",
        "reading the model: 1.5 of 2.0 GB a rank, 20 s, 7 s left",
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
