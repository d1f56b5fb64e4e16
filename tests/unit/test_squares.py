"""The laptop's pictures say what their answers say; its tiny vision-language model is one for transformers, too."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

import megagrpo.cpu.engine.sitecustomize  # noqa: F401  before transformers, whose models load torchvision, see there

# isort: split
from transformers import AutoModelForImageTextToText, AutoProcessor

from examples.laptop.recipe import DatasetConfig
from examples.laptop.squares import make_seeing_model, pictures
from megagrpo.config.schema import DataConfig
from megagrpo.data.images import ImageStore
from megagrpo.data.prompts import load_prompts, load_tokenizer
from megagrpo.models.folder import Model
from megagrpo.system.run_folder import write_json_lines

SIZES = DatasetConfig(kind="squares", num_sft=40, num_train=30, num_eval=20)


def counted(uri: str) -> int:
    """Cells of the picture that are not white."""
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))
    return sum((pixels[y, x] != 255).any() for y in range(7, 56, 14) for x in range(7, 56, 14))


def test_pictures_are_right_different_and_repeatable():
    files = pictures(SIZES, seed=0)
    rows = [row for name in ("sft", "train", "eval") for row in files[name]]
    assert [len(files[name]) for name in ("sft", "train", "eval")] == [40, 30, 20]
    assert all(counted(row["images"][0]) == int(row["answer"]) for row in rows)
    assert {row["answer"] for row in rows} == set("1234") and len({row["images"][0] for row in rows}) == 90
    assert sorted(row["images"] for row in files["permuted"]) == sorted(row["images"] for row in files["eval"])
    assert [row["answer"] for row in files["permuted"]] == [row["answer"] for row in files["eval"]]
    assert 2 < sum(counted(row["images"][0]) == int(row["answer"]) for row in files["permuted"]) < 12
    assert pictures(SIZES, seed=0) == files != pictures(SIZES, seed=1)


@pytest.mark.filterwarnings("ignore")
def test_the_tiny_model_sees(tmp_path):
    size = make_seeing_model(str(tmp_path / "model"), seed=0)
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(parameter.numel() for parameter in model.parameters()) == size
    write_json_lines(tmp_path / "rows.jsonl", pictures(SIZES, 0)["eval"])
    model_folder = Model.read(tmp_path / "model")
    store = ImageStore.of(model_folder, tmp_path / "images")
    data = DataConfig(path=str(tmp_path / "rows.jsonl"), images_key="images", chat_template=True)
    prompts = load_prompts(data, load_tokenizer(model_folder), store).prompts
    assert {len(prompt.token_ids) for prompt in prompts} == {1 + 4 + 1 + len("How many?")}
    image = Image.open(io.BytesIO(store.png(prompts[0].images[0].key)))
    inputs = AutoProcessor.from_pretrained(tmp_path / "model")(
        text=[prompts[0].text], images=[image], return_tensors="pt"
    )
    assert inputs["input_ids"][0].tolist() == prompts[0].token_ids.tolist()
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    assert logits.isfinite().all() and 0.1 < logits.std() < 10
