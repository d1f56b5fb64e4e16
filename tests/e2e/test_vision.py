"""Models that see, with real engines: what they read of images, and their log-probabilities beside transformers'."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_process import OneEngine, started_engines
from run_megagrpo import (
    Job,
    assert_agrees,
    assert_same_run,
    metrics,
    rollouts,
    run_experiment,
    succeed,
    write_experiment,
)
from test_restart import kill_rank
from test_run_failures import WATCHED, during_rollout, kill_engine

import megagrpo.cpu.engine.sitecustomize  # noqa: F401  before transformers, whose models load torchvision, see there

# isort: split
from transformers import AutoModelForImageTextToText

from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.images import ImageStore
from megagrpo.data.prompts import load_prompts, load_tokenizer
from megagrpo.models.folder import Model
from megagrpo.rollout.admission import AdmissionQueue
from megagrpo.rollout.engine_choice import Engines
from megagrpo.rollout.generation import (
    GenerationClient,
    GenerationFailed,
    RetryPolicy,
    SampleRequest,
    SamplingParams,
    SentImages,
)
from megagrpo.rollout.response import UNVERIFIED, Response
from megagrpo.system.run_folder import RunFolder
from megagrpo.types import Prompt
from tests.experiments import experiment
from tests.pictures import write_rows
from tests.tiny_vlm import make_tiny_vlm

STEPS = 3
SIZES = [[(112, 84)], [], [(70, 100), (300, 64), (64, 64)], [(56, 56), (500, 333)]]


class Engine:
    """A real engine of a tiny model, and prompts with 0 to 3 images."""

    def __init__(self, running: OneEngine, config: ExperimentConfig, folder: Path):
        self.running, self.folder = running, Path(config.model.path)
        store = ImageStore.of(Model.of(config), folder / "images")
        assert store is not None
        self.store = store
        self.prompts = load_prompts(config.data, load_tokenizer(Model.of(config)), store).prompts
        self.model = AutoModelForImageTextToText.from_pretrained(self.folder, dtype=torch.float32).eval()

    def request(self, prompt: Prompt, max_tokens: int, seed: int = 0, **changes) -> SampleRequest:
        stops = (self.store.image_token, self.store.video_token)
        params = SamplingParams(temperature=1.0, max_tokens=max_tokens, stop_token_ids=stops)
        images = None
        if prompt.images:
            uris = [self.store.uri(image.key) for image in prompt.images]
            number = sum(self.store.tokens(image.grid) for image in prompt.images)
            images = SentImages(**{"uris": uris, "short_ids": prompt.short_ids, "num_tokens": number} | changes,
                                location=prompt.location)  # fmt: skip
        return SampleRequest(prompt.token_ids, params, seed, UNVERIFIED, images=images)

    def generate(self, requests: list[SampleRequest]) -> list[Response]:
        async def run() -> list[Response]:
            retry = RetryPolicy(0, 60.0)
            engines = Engines(lambda: [replace(self.running.info, serves=True)], OneEngine.api_key)
            async with GenerationClient(engines, retry, AdmissionQueue(64)) as client:
                return await asyncio.gather(*map(client.generate, requests))

        return asyncio.run(run())

    @torch.no_grad()
    def logprobs(self, prompt: Prompt, response: Response) -> np.ndarray:
        """Of the response's tokens, by transformers."""
        ids = torch.from_numpy(np.concatenate([prompt.token_ids, response.token_ids])).long()[None]
        inputs = {}
        if prompt.images:
            pixels = torch.cat([self.store.pixels(image.key) for image in prompt.images])
            inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([image.grid for image in prompt.images])}
            inputs["mm_token_type_ids"] = (ids == self.store.image_token).int()
        ids_in = ids[:, :-1]  # the last token may be a placeholder itself
        inputs |= {k: v[:, :-1] for k, v in inputs.items() if k == "mm_token_type_ids"}
        logits = self.model(input_ids=ids_in, attention_mask=torch.ones_like(ids_in), **inputs).logits[0]
        start = len(prompt.token_ids) - 1
        return logits[start:].log_softmax(-1).gather(1, ids[0, start + 1 :, None])[:, 0].numpy()


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def engine(request, tmp_path_factory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_tiny_vlm(folder / "model", request.param)
    path = write_rows(folder / "rows.jsonl", SIZES)
    config = experiment(
        model={"path": str(model)},
        data={"path": str(path), "images_key": "images", "chat_template": True},
        rollout={"load_format": "model"},
    )
    with started_engines(config, folder) as [running]:
        yield Engine(running, config, folder)


@pytest.mark.slow
def test_engines_read_the_trainers_prompts_and_agree_with_transformers(engine):
    requests = [engine.request(prompt, 8, seed) for prompt in engine.prompts for seed in range(2)]
    for number, response in enumerate(engine.generate(requests)):
        prompt = engine.prompts[number // 2]
        difference = np.abs(response.logprobs - engine.logprobs(prompt, response)).max()
        assert difference < 1e-5, (prompt.location, difference)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_count_the_tokens_of_images_of_500_sizes_as_trainers_do(engine, tmp_path):
    """The client refuses an answer whose count of image tokens, or whose expanded prompt, differs."""
    random = np.random.default_rng(0)
    sizes = [tuple(map(int, size)) for size in random.integers(24, 700, (500, 2))]
    path = write_rows(tmp_path / "rows.jsonl", [[size] for size in sizes])
    data = engine.running.config.data.model_copy(update={"path": str(path)})
    prompts = load_prompts(data, load_tokenizer(Model.of(engine.running.config)), engine.store).prompts
    assert len(prompts) == len(sizes) and len({prompt.images[0].grid for prompt in prompts}) > 50
    for first in range(0, len(prompts), 50):
        assert len(engine.generate([engine.request(prompt, 1) for prompt in prompts[first : first + 50]])) == 50


@pytest.mark.slow
def test_an_engine_that_reads_another_prompt_is_an_error_that_names_the_row(engine):
    first = engine.prompts[0]
    other = engine.store.uri(engine.prompts[2].images[0].key)
    for changes in ({"uris": [other]}, {"num_tokens": 3}):
        with pytest.raises(GenerationFailed, match=r"rows\.jsonl:1: the engine has read another prompt"):
            engine.generate([engine.request(first, 2, **changes)])


@pytest.mark.slow
def test_a_sampled_placeholder_ends_the_response(engine):
    requests = [engine.request(engine.prompts[0], 200, seed) for seed in range(24)]
    stops, ended = {engine.store.image_token, engine.store.video_token}, 0
    for response in engine.generate(requests):
        *before, last = response.token_ids.tolist()
        assert not stops & set(before)
        ended += last in stops
        assert last not in stops or response.finish_reason == "stop"
    assert ended > 2, "a random model samples one in every few hundred tokens"


@pytest.fixture(scope="module")
def sections(tmp_path_factory) -> dict:
    """Of an experiment in which every prompt comes in every step."""
    folder = tmp_path_factory.mktemp("seen")
    path = write_rows(folder / "rows.jsonl", SIZES)
    return {
        "model": {"path": str(make_tiny_vlm(folder / "model"))},
        "data": {"path": str(path), "images_key": "images", "chat_template": True, "max_prompt_tokens": 256},
        "sampling": {"max_response_tokens": 16},
        "train": {"num_steps": STEPS, "num_prompts_per_step": len(SIZES), "group_size": 4},
        "actor": {"world_size": 1, "parallel": {"ep": 1}, "optimizer": {"lr": 1e-2}},
        "rollout": {"start_timeout_s": 480},
    }


@pytest.mark.slow  # in CI: engines (test_vision_publish) and trainers (dist/test_actor_vision)
def test_a_run_on_pictures_that_come_again_and_text_beside_them(sections, tmp_path):
    """Features of older weights that an engine kept would show in the mismatch."""
    folder = tmp_path / "run"
    run_experiment(folder, timeout_s=560, **sections, log={"tensorboard": False, "dump_steps": [2]})
    entries = metrics(folder)
    for step in range(1, STEPS + 1):
        assert entries[step]["mismatch/logprob_abs_mean"] < 1e-5, entries[step]
    assert any(entries[step]["optim/grad_norm"] > 0 for step in range(1, STEPS)), "else the weights never changed"
    keys = {image for groups in rollouts(folder).values() for group in groups for image in group.get("images", ())}
    assert keys == {path.stem for path in RunFolder(folder).images.glob("*.png")} and len(keys) == sum(map(len, SIZES))
    replayed = succeed("replay", folder.with_suffix(".yaml"), RunFolder(folder).dump(2))
    then, now = next(line.split()[-2:] for line in replayed.stdout.splitlines() if line.startswith("loss/total"))
    assert then != "-" and now != "-"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_with_images_on_the_way_and_run_again_it_is_the_same_run(sections, tmp_path):
    """The engine dies in a rollout, a trainer in the next one, then all; the run goes on from a checkpoint."""
    rollout = sections["rollout"] | WATCHED["rollout"]
    more = sections | {"rollout": rollout, "weights": WATCHED["weights"], "checkpoint": {"every": 1, "keep": 20}}
    more["train"] = sections["train"] | {"num_steps": 2 * STEPS}
    run_experiment(tmp_path / "undisturbed", timeout_s=560, **more)
    folder = tmp_path / "killed"
    config = write_experiment(folder, **more)
    with Job("run", config) as job:
        job.wait_for_step(1)
        kill_engine(job, folder, lambda log: during_rollout(log, len(SIZES) * 4))
        job.wait_for_step(2)
        kill_rank(job, folder, 0, lambda log: during_rollout(log, len(SIZES) * 4))
        job.wait_for_step(4)
        job.kill()
    done = succeed("run", config)
    assert "continues after step" in done.stdout
    assert_same_run(folder, tmp_path / "undisturbed", 2 * STEPS)
    assert_agrees(folder)
