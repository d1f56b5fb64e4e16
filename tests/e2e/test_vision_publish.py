"""A publish to an engine that sees: the tower arrives, and features of images that older weights computed are gone."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from engine_process import OneEngine
from test_exchange import KEY, PlainSource, exchange_for, experiment, plant_fault, started

import megagrpo.cpu.engine.sitecustomize  # noqa: F401  before transformers, whose models load torchvision, see there

# isort: split
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from megagrpo.mesh import LeaderError
from megagrpo.weights.hf_folder import HfFolder
from tests.tiny_vlm import VOCABULARY, make_tiny_vlm

pytestmark = pytest.mark.verifies("weights", "vision towers arrive by every transport")

PAD = VOCABULARY["<|image_pad|>"]


class Asked:
    """One picture and a question, as an engine and as transformers gets them."""

    def __init__(self, model: Path, seed: int, size: tuple[int, int]):
        pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
        image = Image.fromarray(pixels.to(torch.uint8).numpy())
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]
        processor = AutoProcessor.from_pretrained(model)
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        self.inputs = processor(text=[text], images=[image], return_tensors="pt")
        self.prompt = self.inputs["input_ids"][0].tolist()
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        short = processor.tokenizer(text)["input_ids"]
        self.body = {
            "input_ids": short,
            "image_data": ["data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()],
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 6, "ignore_eos": True},
        }

    def answer(self, url: str) -> tuple[list[int], torch.Tensor]:
        """Response tokens and their log-probabilities; no placeholder, which transformers would take for an image."""
        while True:
            answer = httpx.post(f"{url}/generate", json=self.body, headers=KEY, timeout=300).raise_for_status().json()
            meta, found = answer["meta_info"], answer["meta_info"]["output_token_logprobs"]
            assert meta["image_tokens"] == self.prompt.count(PAD)
            response = [entry[1] for entry in found]
            if PAD not in response and VOCABULARY["<|video_pad|>"] not in response:
                return response, torch.tensor([entry[0] for entry in found])

    @torch.no_grad()
    def logprobs(self, model: Path, response: list[int]) -> torch.Tensor:
        """Of the response's tokens, by transformers."""
        loaded = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
        ids = torch.tensor([self.prompt + response])
        kinds = torch.nn.functional.pad(self.inputs["mm_token_type_ids"], (0, len(response)))
        rest = {key: self.inputs[key] for key in ("pixel_values", "image_grid_thw")}
        logits = loaded(input_ids=ids[:, :-1], mm_token_type_ids=kinds[:, :-1], **rest).logits[0]
        return logits[len(self.prompt) - 1 :].log_softmax(-1).gather(1, ids[0, len(self.prompt) :, None])[:, 0]

    def distance(self, url: str, model: Path) -> float:
        response, found = self.answer(url)
        return float((found - self.logprobs(model, response)).abs().max())


CASES = [
    ("qwen2_5_vl", 1),
    pytest.param(("qwen3_vl_moe", 1), marks=pytest.mark.slow),
    pytest.param(("qwen2_5_vl", 2), marks=pytest.mark.slow),
    pytest.param(("qwen3_vl", 2), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-TP{case[1]}")
def case(request) -> tuple[str, int]:
    """Family, and tensor-parallel ranks of the engine."""
    return request.param


@pytest.fixture(scope="module")
def models(case, model_of) -> list[Path]:
    return [model_of(make_tiny_vlm, case[0], seed) for seed in range(2)]


@pytest.fixture(scope="module")
def engine(case, models, tmp_path_factory) -> Iterator[OneEngine]:
    with started(experiment(models[0], "broadcast", {"tp": case[1]}), tmp_path_factory.mktemp("engine")) as engine:
        yield engine


def test_a_new_tower_sees_images_that_were_seen_before(engine, models, tmp_path):
    source, asked = PlainSource(models[0]), Asked(models[0], 1, (112, 84))
    ways = (("reshard", 0), ("reshard", 1), ("disk", 0), ("broadcast", 1), ("ipc", 0), ("ipc", 1), ("reshard", 1))
    for version, (transport, model) in enumerate(ways, 1):
        exchange = exchange_for(engine, source.load(models[model]), transport, tmp_path)
        exchange.publish(version)
        exchange.verify()
        exchange.close()
        assert asked.distance(engine.info.url, models[model]) < 1e-5, (version, transport)
        assert asked.distance(engine.info.url, models[model]) < 1e-5, "from the cache"
    assert asked.distance(engine.info.url, models[0]) > 1e-2, "weights that differ"


def test_a_tower_that_one_engine_does_not_have_is_named(engine, models, tmp_path):
    exchange = exchange_for(engine, PlainSource(models[0]).load(models[0]), "reshard", tmp_path)
    exchange.publish(10)
    ends = ("blocks.2.mlp.down_proj.weight", "blocks.2.mlp.linear_fc2.weight")
    name = next(name for name in HfFolder(models[0]) if name.endswith(ends))
    tp = engine.config.rollout.tp
    plant_fault(engine.info.url, tp, tp - 1, name.removeprefix("model."), 7)
    with pytest.raises(LeaderError, match=name.replace(".", r"\.")):
        exchange.verify()
    exchange.publish(11)
    exchange.close()


def test_features_that_stay_in_the_cache_stop_the_publish(engine, models, tmp_path):
    exchange = exchange_for(engine, PlainSource(models[0]).load(models[0]), "reshard", tmp_path)
    exchange.publish(20)
    asked = Asked(models[0], 2, (56, 56))
    asked.answer(engine.info.url)
    plant_fault(engine.info.url, engine.config.rollout.tp, 0, "keep the features of images", 0)
    with pytest.raises(LeaderError, match="1 features of images that older weights computed are still in the engine"):
        exchange.publish(21)
    exchange.close()
