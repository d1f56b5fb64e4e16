"""Prompts with images: what is read of files, both forms of their token ids, and every mistake by file and line."""

import io
import json
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

import megagrpo.cpu.engine.sitecustomize  # noqa: F401  before transformers, whose models load torchvision, see there

# isort: split
from transformers import AutoProcessor

from megagrpo.checkpoint.resume import run_identity
from megagrpo.config.fields import complaints
from megagrpo.config.schema import DataConfig
from megagrpo.data import prompts as prompts_module
from megagrpo.data.images import ImageStore
from megagrpo.data.prompts import load_prompts, load_tokenizer
from megagrpo.models.folder import Model
from megagrpo.monitor.metrics import Metrics
from megagrpo.monitor.rollout_log import RolloutLog
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.check.loading import try_loading
from megagrpo.tools.view.samples import read_samples
from megagrpo.types import Outcome, RolloutGroup, Sample
from tests.experiments import experiment
from tests.pictures import picture, png, uri, write_rows
from tests.tiny_vlm import VOCABULARY, make_tiny_vlm

IMAGE = VOCABULARY["<|image_pad|>"]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def model(request, tmp_path_factory) -> Model:
    return Model.read(make_tiny_vlm(tmp_path_factory.mktemp(request.param) / "model", request.param))


@pytest.fixture
def load(model, tmp_path):
    """Loads rows given as dicts; returns the prompts and the store."""
    store = ImageStore.of(model, tmp_path / "images")

    def loaded(*rows: dict, **keys):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"answer": "1"} | row) + "\n" for row in rows))
        data = DataConfig(path=str(path), chat_template=True, **({"images_key": "images"} | keys))
        return load_prompts(data, load_tokenizer(model), store).prompts, store

    return loaded


def test_both_forms_of_the_ids_and_the_pixels_are_the_processors_own(model, tmp_path):
    random = np.random.default_rng(0)
    sizes = [[tuple(map(int, random.integers(30, 500, 2))) for _ in range(number)] for number in (1, 0, 3, 2) * 5]
    data = DataConfig(path=str(write_rows(tmp_path / "r.jsonl", sizes)), images_key="images", chat_template=True)
    store = ImageStore.of(model, tmp_path / "images")
    prompts = load_prompts(data, load_tokenizer(model), store).prompts
    processor = AutoProcessor.from_pretrained(model.folder)
    for prompt, of_row in zip(prompts, sizes, strict=True):
        images = [Image.open(io.BytesIO(store.png(ref.key))) for ref in prompt.images]
        expected = processor(text=[prompt.text], images=images or None, return_tensors="pt")
        assert prompt.token_ids.tolist() == expected["input_ids"][0].tolist()
        if not of_row:
            assert prompt.short_ids is None
            continue
        assert (prompt.short_ids == IMAGE).sum() == len(of_row) == len(prompt.images)
        assert [list(ref.grid) for ref in prompt.images] == expected["image_grid_thw"].tolist()
        pixels = torch.cat([store.pixels(ref.key) for ref in prompt.images])
        assert torch.equal(pixels, expected["pixel_values"]) and pixels.dtype is torch.float32
        places = [p for ref in prompt.images for p in range(ref.start, ref.start + store.tokens(ref.grid))]
        assert places == np.flatnonzero(prompt.token_ids == IMAGE).tolist()
        assert all(image.size == (ref.grid[2] * store._processor.patch_size, ref.grid[1] * store._processor.patch_size)
                   for image, ref in zip(images, prompt.images, strict=True))  # fmt: skip


def test_every_way_to_write_an_image_is_the_same_prompt(model, load, tmp_path):
    data = png(picture(1))
    for name in ("a b.png", "a%20b.png"):
        (tmp_path / name).write_bytes(data)
    text, image = {"type": "text", "text": "How many?"}, {"type": "image"}
    rows = [
        {"prompt": "<image>How many?", "images": ["a b.png"]},
        {"prompt": "<image>How many?", "images": "a b.png"},
        {"prompt": "<image>How many?", "images": "a%20b.png"},
        {"prompt": "<image>How many?", "images": [{"bytes": None, "path": str(tmp_path / "a b.png")}]},
        {"prompt": [{"role": "user", "content": "<image>How many?"}], "images": [uri(data)]},
        {"prompt": [{"role": "user", "content": [image, text]}], "images": ["a b.png"]},
        {"prompt": [{"role": "user", "content": [image | {"image": uri(data)}, text]}]},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri(data)}}, text]}]},
        {"prompt": [{"role": "user", "content": [image | {"path": f"file://{tmp_path}/a%20b.png"}, text]}]},
    ]
    prompts, store = load(*rows)
    assert len({prompt.images for prompt in prompts}) == 1 and len(prompts[0].images) == 1
    assert len({prompt.text for prompt in prompts}) == 1
    asked = [{"role": "user", "content": [image, text]}]
    assert all(prompt.messages == asked for prompt in prompts), "no bytes, which checkpoints hold"
    assert prompts[0].transcript == "<image>How many?", "as a judge reads it"
    table = pyarrow.table({"prompt": ["<image>How many?"], "answer": ["1"], "images": [[{"bytes": data, "path": "x"}]]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    keys = DataConfig(path=str(tmp_path / "rows.parquet"), images_key="images", chat_template=True)
    assert load_prompts(keys, load_tokenizer(model), store).prompts[0].images == prompts[0].images
    assert len(list((tmp_path / "images").glob("*.png"))) == 1, "kept once"


def test_a_drawing_on_nothing_lies_on_white_and_a_turned_photograph_is_upright(load, tmp_path):
    clear = Image.new("RGBA", (112, 112), (0, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    turned = Image.new("RGB", (112, 56), "red")
    turned.paste("blue", (0, 0, 56, 56))
    tag = Image.Exif()
    tag[0x0112] = 6
    turned.save(tmp_path / "turned.png", exif=tag)
    prompts, store = load({"prompt": "<image><image>", "images": ["clear.png", "turned.png"]})
    white, upright = (Image.open(io.BytesIO(store.png(ref.key))) for ref in prompts[0].images)
    assert white.getextrema() == ((255, 255),) * 3
    assert upright.height > upright.width


@pytest.mark.parametrize("model", ["qwen2_5_vl"], indirect=True)
def test_gray_of_sixteen_bits_keeps_its_shades(load, tmp_path):
    shades = np.linspace(0, 65535, 112 * 112).reshape(112, 112)
    Image.fromarray(shades.astype(np.uint16)).save(tmp_path / "scan.png")
    (prompt,), store = load({"prompt": "<image>", "images": ["scan.png"]})
    seen = np.asarray(Image.open(io.BytesIO(store.png(prompt.images[0].key))))
    assert np.abs(seen - shades[..., None] / 257).max() <= 1
    Image.fromarray(shades.astype(np.uint16)).save(tmp_path / "clear.png", transparency=7)
    (prompt,), store = load({"prompt": "<image>", "images": ["clear.png"]})
    assert (seen == np.asarray(Image.open(io.BytesIO(store.png(prompt.images[0].key))))).all()
    Image.fromarray(shades.astype(np.float32)).save(tmp_path / "scan.tiff")
    with pytest.raises(ValueError, match="no known range"):
        load({"prompt": "<image>", "images": ["scan.tiff"]})


@pytest.mark.parametrize("model", ["qwen2_5_vl"], indirect=True)
def test_an_image_is_decoded_once_for_all_ranks_and_starts(model, load, monkeypatch):
    decoded = []
    opened = Image.open
    monkeypatch.setattr(Image, "open", lambda data: decoded.append(data) or opened(data))
    rows = [{"prompt": f"<image>{n}", "images": [uri(png(picture(n)))]} for n in range(5)]
    prompts, store = load(*rows)
    assert len(decoded) == 5
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    again, _ = load(*rows)
    assert [p.images for p in again] == [p.images for p in prompts] and len(decoded) == 5
    assert [p.text for p in again] == [p.text for p in prompts], "in the file's order"
    store.path(prompts[3].images[0].key).write_bytes(b"")  # a node died before it was on disk
    assert [p.images for p in load(*rows)[0]] == [p.images for p in prompts]
    assert len(decoded) == 6 and store.png(prompts[3].images[0].key)


@pytest.mark.parametrize("model", ["qwen2_5_vl"], indirect=True)
def test_rows_that_hold_images_are_read_a_block_at_a_time(model, load, tmp_path, monkeypatch):
    held = []
    rendered = prompts_module.render_rows
    monkeypatch.setattr(prompts_module, "_BLOCK", 2)
    monkeypatch.setattr(prompts_module, "render_rows", lambda *a: held.append(len(a[2])) or rendered(*a))
    prompts, _ = load(*({"prompt": f"<image>{n}", "images": [uri(png(picture(n)))]} for n in range(3)))
    assert [prompt.id for prompt in prompts] == [0, 1, 2] and held == [2, 1]


BROKEN = [
    ({"prompt": "<image><image>?", "images": [uri(png(picture(0)))]}, r"2 <image> and the row 1 image\(s\)"),
    ({"prompt": "?", "images": [uri(png(picture(0)))]}, r"0 <image> and the row 1 image\(s\)"),
    ({"prompt": "<image>?"}, r"1 <image> and the row 0 image\(s\)"),
    ({"prompt": "<image>?", "images": ["missing.png"]}, "image 1 cannot be used: FileNotFoundError"),
    ({"prompt": "<image>?", "images": ["rows.jsonl"]}, "image 1 cannot be used: UnidentifiedImageError"),
    ({"prompt": "<image>?", "images": [uri(png(picture(0))[:200])]}, "image 1 cannot be used: OSError"),
    ({"prompt": "<image>?", "images": [uri(png(Image.new("RGB", (2000, 4))))]}, "absolute aspect ratio"),
    ({"prompt": "<image>?", "images": ["https://example.org/a.png"]}, "nothing is downloaded"),
    ({"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "a part of type 'video'"),
    ({"prompt": "what is <|image_pad|>"}, r"1 image placeholder\(s\) for 0 image\(s\)"),
    ({"prompt": "<image><|image_pad|>", "images": [uri(png(picture(0)))]}, r"2 image placeholder\(s\) for 1"),
    ({"prompt": "what is <|video_pad|>"}, "and one of a video"),
]


@pytest.mark.parametrize("model", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize("row, said", BROKEN, ids=[said for _, said in BROKEN])
def test_every_mistake_names_its_row(load, row, said):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{said}"):
        load({"prompt": "How many?"}, row)


@pytest.mark.parametrize("model", ["qwen2_5_vl"], indirect=True)
def test_the_limit_of_a_prompt_counts_the_tokens_of_images(load):
    small, large = (uri(png(picture(0, size))) for size in ((56, 56), (224, 224)))
    prompts, _ = load(*({"prompt": "<image>", "images": [image]} for image in (small, large)), max_prompt_tokens=40)
    assert [len(prompt.token_ids) for prompt in prompts] == [19 + 2 + 4]


@pytest.mark.parametrize("model", ["qwen2_5_vl"], indirect=True)
def test_what_a_model_without_eyes_and_what_tools_refuse(model, tmp_path):
    path = str(write_rows(tmp_path / "rows.jsonl", [[(56, 56)]]))
    keys = {"path": path, "images_key": "images"}
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the prompt has images, but the model"):
        load_prompts(DataConfig(**keys, chat_template=True), load_tokenizer(model))
    [said] = complaints(lambda: DataConfig(**keys))
    assert "images_key needs chat_template" in said
    tool = {"environment": {"function": "calculator", "rewards": False}}
    [said] = complaints(lambda: experiment(data=keys | {"chat_template": True}, sampling=tool))
    assert "continue prompts of text only" in said


@pytest.mark.parametrize("model", ["qwen2_5_vl"], indirect=True)
def test_check_tries_the_first_rows_and_leaves_nothing_behind(model, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [[], [(56, 56)], [(70, 90)]])
    sections = {"data": {"path": str(path), "images_key": "images", "chat_template": True}}
    config = experiment(model={"path": str(model.folder)}, output_dir=str(tmp_path / "run"), **sections)
    trial = try_loading(config)
    assert not trial.problems and not (tmp_path / "run").exists()
    data = sections["data"] | {"images_key": "imgs"}
    text = path.read_text()
    path.write_text(text.replace("<image>", ""))
    advice = try_loading(experiment(model={"path": str(model.folder)}, data=data)).advice
    assert f"{path}: no row tried has data.images_key 'imgs'" in advice
    path.write_text(text.replace("base64,", "base64,AAAA", 2))
    problems = sorted(try_loading(config).problems)
    rows = [f"{path}:{number}: image 1 cannot be used" for number in (2, 3)]
    assert [problem[: len(row)] for problem, row in zip(problems, rows, strict=True)] == rows


def test_a_checkpoint_is_of_the_same_model_after_it_was_read(model):
    actor = SimpleNamespace(arch=model.arch)
    identity = run_identity(experiment(), actor).model
    assert json.loads(json.dumps(identity)) == identity
    other = experiment(actor={"vision": {"train": "none"}})
    assert run_identity(other, actor).model != identity, "another optimizer"


@pytest.mark.parametrize("model", ["qwen2_5_vl"], indirect=True)
def test_view_shows_the_images_of_the_prompts(load, tmp_path):
    prompts, store = load({"prompt": "<image>", "images": [uri(png(picture(0)))]}, {"prompt": "1"})
    outcome, sample = Outcome("score", 1.0), Sample(0, [1], [0.0], "stop", 0, "3")
    groups = [RolloutGroup(number, prompt, (sample,), (outcome,)) for number, prompt in enumerate(prompts)]
    with closing(RolloutLog(RunFolder(tmp_path), 0)) as log:
        log.write(1, groups)
    (key,) = (ref.key for ref in prompts[0].images)
    shown, _ = read_samples(RunFolder(tmp_path), 1e6)
    assert shown["images"] == {key: store.uri(key)}
    assert [group.get("images") for group in shown["groups"]] == [[key], None]
    assert read_samples(RunFolder(tmp_path), 100)[0]["images"] == {}, "more bytes than may be shown"


def test_bytes_of_images_are_counted(model, load):
    data = png(picture(1, (112, 112)))
    prompts, store = load(*[{"prompt": "<image>How many?", "images": [uri(data)]}] * 3)
    key, (kept,) = prompts[0].images[0].key, store._folder.glob("*.png")
    for prompt in prompts:
        sent = store.uri(prompt.images[0].key)
    pixels = store.pixels(key)
    for used in (1, 0):
        store.add_metrics(metrics := Metrics())
        found = metrics.reduced(lambda values, op: values)
        assert found["images/held_mb"] == kept.stat().st_size / 1e6, "three prompts, one file"
        assert found["images/sent_mb"] == used * 3 * len(sent) / 1e6
        assert found["images/moved_mb"] == used * pixels.nbytes / 1e6 and (found["images/processing_s"] > 0) == used
