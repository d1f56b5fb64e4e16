"""A model with recurrent layers in a real engine: an old state never answers for new weights."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from engine_logprobs import PROMPTS, logprob_difference, logprobs_by, sampled
from engine_process import OneEngine, started_engines
from test_exchange import KEY, NUM_PROMPT_TOKENS, PlainSource, exchange_for, experiment
from transport_cases import make_model

from examples.laptop.model import write_model
from megagrpo.cpu import engine_settings as stand_ins
from megagrpo.models.folder import Model
from megagrpo.models.table import read_description
from megagrpo.rollout.service.engine_command import num_states
from megagrpo.rollout.service.engine_model import as_engines_see_it
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.plan.work import model_work
from megagrpo.weights.engines.client import EngineConnection
from megagrpo.weights.hf_folder import HfFolder, write_hf_folder
from tests.experiments import ROOT, until
from tests.published import as_published

pytestmark = [
    pytest.mark.slow,
    pytest.mark.verifies("weights", "recurrent layers: after a publish no state of older weights answers, within 1e-4"),
]
FAMILIES = ("qwen3_5_moe_text", "nemotron_h", "kimi_linear")
BOUND, DIFFERS = 1e-4, 1e-2  # of log-probabilities: of the same weights, of others
NEW_TOKENS = 12
SEEING = ROOT / "configs" / "models" / "Qwen3.5-397B-A17B"


@pytest.fixture(scope="module", params=FAMILIES)
def models(request, tmp_path_factory) -> tuple[Path, Path]:
    """Two folders with different weights."""
    first = make_model(tmp_path_factory.mktemp("models") / "first", request.param)
    second = first.with_name("second")
    generator = torch.Generator().manual_seed(1)
    others = {
        name: tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in HfFolder(first).items()
    }
    write_hf_folder(second, iter([others]), like=first, dtype=torch.float32)
    return first, second


@pytest.fixture(scope="module")
def engine(models, tmp_path_factory) -> Iterator[OneEngine]:
    config = experiment(models[0], "reshard", {"max_running_requests": 8})
    folder, own_modules = tmp_path_factory.mktemp("engine"), [str(Path(__file__).parent)]
    with started_engines(config, folder, own_modules) as (engine,):
        yield engine


class Publisher:
    """One trainer's exchange with the engine, which publishes whole folders."""

    def __init__(self, engine: OneEngine, models: tuple[Path, Path], folder: Path):
        self.source = PlainSource(models[0])
        self.exchange = exchange_for(engine, self.source, "reshard", folder)
        self.version = 0

    def publish(self, model: Path) -> str:
        self.source.load(model)
        self.version += 1
        self.exchange.publish(self.version)
        return str(self.version)


@pytest.fixture
def publisher(engine, models, tmp_path) -> Iterator[Publisher]:
    publisher = Publisher(engine, models, tmp_path)
    yield publisher
    publisher.exchange.close()


def answer(engine: OneEngine, ids: list[int], key: str | None = None) -> dict:
    """A response to ids; key: only requests with the same one share prefixes."""
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": sampling}
    body |= {} if key is None else {"extra_key": key}
    response = httpx.post(f"{engine.info.url}/generate", json=body, headers=KEY, timeout=300)
    return response.raise_for_status().json()


def distance(model: Path, prompt: list[int], response: dict) -> float:
    """The largest of the response's log-probabilities to those of engine_logprobs.py."""
    found = torch.tensor([entry[0] for entry in response["meta_info"]["output_token_logprobs"]])
    expected = logprobs_by(model, prompt + response["output_ids"])[len(prompt) - 1 :]
    return float((found - expected).abs().max())


def test_an_old_state_never_answers_for_new_weights(engine, models, publisher, monkeypatch):
    old, new = models
    prompt = PROMPTS[1]
    publisher.publish(old)
    first = answer(engine, prompt)
    assert distance(old, prompt, first) <= BOUND
    longer = prompt + first["output_ids"] + [7]
    goes_on = answer(engine, longer)
    assert goes_on["meta_info"]["cached_tokens"] > 0, "no state was kept, so none can be old"
    assert distance(old, longer, goes_on) <= BOUND
    publisher.publish(new)
    after = answer(engine, longer)
    assert after["meta_info"]["cached_tokens"] == 0
    assert distance(new, longer, after) <= BOUND

    # The same without the flush: this is what the test would see.
    digests = EngineConnection.digests
    monkeypatch.setattr(EngineConnection, "digests", lambda self, flush: digests(self, False))
    publisher.publish(old)
    longest = longer + after["output_ids"] + [7]  # a state is kept of a response's end only
    stale = answer(engine, longest)
    assert stale["meta_info"]["cached_tokens"] > 0
    assert distance(old, longest, stale) > DIFFERS


def test_a_cache_by_version_keeps_states_apart(engine, models, tmp_path):
    """rollout.prefix_cache: by_version. A rollout goes on from the state of the weights that it
    began with, and only such a one."""
    rollout = engine.config.rollout.model_copy(update={"prefix_cache": "by_version", "max_staleness": 1})
    whole = engine.config
    engine.config = whole.model_copy(update={"rollout": rollout})
    publisher = Publisher(engine, models, tmp_path)
    old, new = models
    prompt = PROMPTS[1]
    begun = publisher.publish(old)
    first = answer(engine, prompt, begun)
    longer = prompt + first["output_ids"] + [7]
    now = publisher.publish(new)
    fresh = answer(engine, longer, now)
    assert fresh["meta_info"]["cached_tokens"] == 0
    assert distance(new, longer, fresh) <= BOUND
    longest = longer + fresh["output_ids"] + [7]
    own = answer(engine, longest, now)
    assert own["meta_info"]["cached_tokens"] > 0
    assert distance(new, longest, own) <= BOUND
    goes_on = answer(engine, longer, begun)
    assert goes_on["meta_info"]["cached_tokens"] > 0
    assert distance(new, longer, goes_on) > DIFFERS
    engine.config = whole
    publisher.exchange.close()


@pytest.mark.verifies("runs", "recurrent states: planned bytes are those of a real engine")
def test_planned_states_are_what_an_engine_allocates(engine, models, publisher):
    publisher.publish(models[0])
    (connection,) = publisher.exchange._fleet.alive
    (found,) = connection.ask("bytes", [{"module": "pool_bytes"}])
    connection.resume(publisher.version)
    work = model_work(Model.read(models[0]).arch)
    slots = num_states(engine.config.rollout, cuda=False) + 1
    assert found["states"] == slots * work.state_bytes(1, width=4) > 0
    tokens = stand_ins.SETTINGS["max_total_tokens"] + 1
    assert found["keys and values"] + found["latents"] == tokens * work.cache_bytes(1, width=4)


def make_seeing_model(folder: Path, text: Path) -> Path:
    """The same weights as published files have them: beside a tower (without its tensors), the
    experts of a layer in two tensors."""
    hf, part = (read_description(path / "config.json") for path in (SEEING, text))
    hf |= {"text_config": part} | {key: part[key] for key in part if key.endswith("token_id")}
    tensors = as_published(HfFolder(text).items())
    write_model(folder, hf | {"pad_token_id": 0}, tensors, "0123456789")
    return folder


@pytest.mark.parametrize("models", FAMILIES[:1], indirect=True)
@pytest.mark.parametrize("load_format", ["dummy", "model"])
def test_engines_load_the_text_part_of_a_vision_language_model(load_format, models, tmp_path):
    model = make_seeing_model(tmp_path / "seeing", models[0])
    config = experiment(model, "reshard", {"load_format": load_format, "max_running_requests": 8})
    config = as_engines_see_it(config, RunFolder(tmp_path))
    source = PlainSource(model)
    with started_engines(config, tmp_path) as (engine,):
        if load_format == "model":
            assert logprob_difference(engine.info.url, models[0]).largest <= BOUND
        for version, transport in enumerate(("reshard", "broadcast", "disk"), 1):
            exchange = exchange_for(engine, source.load(model), transport, tmp_path)
            exchange.publish(version)
            exchange.close()
            assert logprob_difference(engine.info.url, models[0], version).largest <= BOUND


def test_a_response_that_outlives_a_publish_is_read_again_by_the_new_weights(engine, models, publisher):
    old, new = models
    publisher.publish(old)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(sampled, engine.info.url, 300)
        loads = f"{engine.info.url}/v1/loads"
        until(
            lambda: httpx.get(loads, headers=KEY).json()["loads"][0]["num_used_tokens"] >= 2 * NUM_PROMPT_TOKENS,
            60,
            poll_s=0,
        )
        assert not asked.done()
        publisher.publish(new)
        responses = asked.result()
    for prompt, response in zip(PROMPTS, responses, strict=True):
        meta, ids = response["meta_info"], response["output_ids"]
        versions, starts = zip(*((span["version"], span["start"]) for span in meta["weight_versions"]), strict=True)
        assert versions == ("1", "2") and 0 < starts[1] < len(ids)
        by_old, by_new = (logprobs_by(model, prompt + ids)[len(prompt) - 1 :] for model in models)
        found = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
        assert (found[: starts[1]] - by_old[: starts[1]]).abs().max() <= BOUND
        assert (found[starts[1] :] - by_new[starts[1] :]).abs().max() <= BOUND
