"""The exchange against a real SGLang engine: weights go in, are proven, and are what the engine then computes with."""

import base64
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import pytest
import torch
from engine_logprobs import PROMPTS, logprob_difference, logprobs_by, sampled
from engine_process import OneEngine, started_engines
from tiny_model import make_tied_model, make_tiny_model

from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import LeaderError, make_mesh
from megagrpo.rollout.control import bearer
from megagrpo.system.environment import WEIGHT_LOADER
from megagrpo.weights.copies.recorder import record_whole
from megagrpo.weights.exchange import Exchange
from megagrpo.weights.hf_folder import HfFolder
from megagrpo.weights.transports import broadcast
from tests import experiments
from tests.experiments import until

KEY = bearer(OneEngine.api_key)
NUM_PROMPT_TOKENS = sum(map(len, PROMPTS))


class PlainSource:
    """An actor whose parameters are the HF tensors."""

    def __init__(self, folder: Path):
        self.hf_specs, self.fixed_dtypes, self.merged = HfFolder(folder).specs, {}, nullcontext
        self.live = {name: torch.zeros(shape) for name, (shape, _) in self.hf_specs.items()}
        self.copies = record_whole(self._load, self.hf_specs, self.live).copies

    def _load(self, hf) -> None:
        for name, tensor in self.live.items():
            tensor.copy_(hf[name])

    def load(self, folder: Path) -> "PlainSource":
        self._load(HfFolder(folder))
        return self

    def parameters(self):
        return self.live


def experiment(model: Path, transport: str, rollout: dict, **sections) -> ExperimentConfig:
    return experiments.experiment(
        output_dir=str(model.parent),
        model={"path": str(model)},
        rollout=rollout,
        weights={"transport": transport, "bucket_mb": 0.1, "timeout_s": 120.0},
        **sections,
    )


def exchange_for(engine: OneEngine, source: PlainSource, transport: str, run_dir: Path) -> Exchange:
    """transport: with "changes" behind it, only what has changed is sent."""
    way = {"transport": transport.removesuffix(" changes"), "delta": transport.endswith(" changes")}
    config = engine.config.model_copy(update={"weights": engine.config.weights.model_copy(update=way)})
    return Exchange(config, make_mesh(0, 1, torch.device("cpu"), 60.0), source, engine, run_dir)


@contextmanager
def started(config: ExperimentConfig, folder: Path) -> Iterator[OneEngine]:
    """The engine has a second weight loader, which plants faults."""
    loaders = ["--custom-weight-loader", WEIGHT_LOADER, "plant_fault.run"]
    with started_engines(config, folder, [str(Path(__file__).parent)], loaders) as (engine,):
        yield engine


def assert_engine_computes_with(url: str, model: Path, version: int) -> None:
    """Log-probs of all tokens equal those of HF transformers, and the answer names the version."""
    assert logprob_difference(url, model, version).largest < 2e-5


def plant_fault(url: str, tp: int, rank: int, parameter: str, index: int | list[list[int]]) -> None:
    payloads = [[(parameter, torch.tensor(index))] if r == rank else [] for r in range(tp)]
    body = {
        "serialized_named_tensors": [base64.b64encode(pickle.dumps(p)).decode() for p in payloads],
        "load_format": "plant_fault.run",
        "flush_cache": False,
    }
    for path, content in (("begin_weight_update", {}), ("update_weights_from_tensor", body), ("end_weight_update", {})):
        httpx.post(f"{url}/{path}", json=content, headers=KEY, timeout=60).raise_for_status()


@pytest.fixture(scope="module")
def moe_models(model_of):
    return [model_of(make_tiny_model, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def moe_engine(moe_models, tmp_path_factory):
    with started(experiment(moe_models[0], "broadcast", {}), tmp_path_factory.mktemp("engine")) as engine:
        yield engine


def test_every_transport_puts_weights_into_a_moe_that_started_with_random_ones(
    moe_engine, moe_models, tmp_path, monkeypatch
):
    source, transports = (PlainSource(moe_models[0]), ("broadcast", "disk", "reshard", "broadcast", "reshard"))
    for version, (transport, seed) in enumerate(zip(transports, (1, 2, 0, 2, 1), strict=True), 1):
        model = moe_models[seed]
        if version == 4:
            monkeypatch.setattr(broadcast, "_ALONE_BYTES", 1)  # tensor by tensor; else they are packed
        exchange = exchange_for(moe_engine, source.load(model), transport, tmp_path)
        report = exchange.publish(version)
        exchange.verify()
        exchange.close()
        assert report["bytes"] == sum(t.numel() * 4 for t in source.live.values())
        assert {"gather", "transfer", "verify", "total"} <= report.keys()
        assert moe_engine.ready_calls[-1] == ("e0", moe_engine.info.incarnation, version)
        assert_engine_computes_with(moe_engine.info.url, model, version)
    assert not (tmp_path / "weights" / "v1").exists()


@pytest.mark.verifies("weights", "a response cut by a publish: old log-probabilities before, new after, within 1e-5")
def test_a_response_that_outlives_a_publish_is_of_the_old_weights_and_then_of_the_new_ones(
    moe_engine, moe_models, tmp_path
):
    """weights.in_flight: retract. What was sampled before the publish is read again by the new weights."""
    source, url = PlainSource(moe_models[1]), moe_engine.info.url
    exchange = exchange_for(moe_engine, source.load(moe_models[1]), "reshard", tmp_path)
    exchange.publish(40)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(sampled, url, 1500)
        used = lambda: httpx.get(f"{url}/v1/loads", headers=KEY).json()["loads"][0][  # noqa: E731
            "num_used_tokens"
        ]
        until(lambda: used() >= 2 * NUM_PROMPT_TOKENS, 60, poll_s=0)
        assert not asked.done()
        source.load(moe_models[2])
        exchange.publish(41)
        responses = asked.result()
    exchange.close()
    for prompt, response in zip(PROMPTS, responses, strict=True):
        meta, ids = response["meta_info"], response["output_ids"]
        spans = [(int(span["version"]), span["start"]) for span in meta["weight_versions"]]
        start = spans[-1][1]
        assert spans == [(40, 0), (41, start)] and 0 < start < len(ids)
        old, new = (logprobs_by(model, prompt + ids)[len(prompt) - 1 :] for model in moe_models[1:])
        found = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
        assert (found[:start] - old[:start]).abs().max() <= 1e-5
        assert (found[start:] - new[start:]).abs().max() <= 1e-5
        assert (old - new).abs().max() > 1e-2, "weights that differ"


UP, EXPERT = 64 * 64, 2 * 64 * 64  # elements of a projection, and of gate and up
RUN = range(3 * EXPERT + UP + 6 * 64 + 5, 3 * EXPERT + UP + 6 * 64 + 25)  # in up_proj of expert 3


@pytest.mark.parametrize(
    ("transport", "index", "named"),
    [
        ("reshard", RUN[0], {"3.up"}),  # one element
        ("reshard", [[*RUN], [i - 400 for i in RUN]], {"3.up"}),  # a run of others
        ("broadcast", [[0, EXPERT], [EXPERT, 0]], {"0.gate", "1.gate"}),  # of two experts
        ("disk", [[*range(EXPERT)], [*range(UP, EXPERT), *range(UP)]], {"0.gate", "0.up"}),  # in the wrong order
    ],
)
def test_what_is_broken_is_found_and_named(transport, index, named, moe_engine, moe_models, tmp_path):
    """tests/unit/test_weights_corruption.py has every kind under every transport."""
    exchange = exchange_for(moe_engine, PlainSource(moe_models[2]).load(moe_models[2]), transport, tmp_path)
    exchange.publish(20)
    parameter = "model.layers.1.mlp.experts.w13_weight"  # [8, 2 * 64, 64]
    plant_fault(moe_engine.info.url, 1, 0, parameter, index)
    with pytest.raises(LeaderError) as caught:
        exchange.verify()
    text = str(caught.value)
    assert f"differ from the trainers' in {len(named)} places" in text
    assert f"engine e0 ({moe_engine.info.url}, incarnation 1) rank 0: parameter {parameter}" in text
    assert all(f"model.layers.1.mlp.experts.{name}_proj.weight [0:64, 0:64]" in text for name in named)
    exchange.publish(21)  # heals
    exchange.verify()
    exchange.close()


def test_an_engine_killed_during_the_update_is_updated_after_its_restart(moe_engine, moe_models, tmp_path):
    source = PlainSource(moe_models[1]).load(moe_models[1])
    exchange = exchange_for(moe_engine, source, "broadcast", tmp_path)
    exchange.publish(30)
    before = moe_engine.info.incarnation
    send, sent = exchange._transport._send_bucket, []

    def kill_at_second_bucket(engine, values, body):
        sent.append(body["names"])
        if len(sent) == 2:
            os.kill(moe_engine.process.pid, signal.SIGSTOP)  # the request is under way when it dies
            threading.Timer(0.3, moe_engine.stop).start()
        send(engine, values, body)

    exchange._transport._send_bucket = kill_at_second_bucket
    source.load(moe_models[0])
    exchange.publish(31)
    assert moe_engine.lost[-1:] == ["e0"] and moe_engine.info.incarnation == before + 1
    assert moe_engine.ready_calls[-1] == ("e0", before + 1, 31)
    assert_engine_computes_with(moe_engine.info.url, moe_models[0], 31)
    exchange.close()


@pytest.mark.slow
def test_dense_with_tied_embeddings_on_two_ranks(tmp_path):
    models = [make_tied_model(tmp_path / f"d{seed}", seed) for seed in range(2)]
    source = PlainSource(models[0])
    with started(experiment(models[0], "broadcast", {"tp": 2}), tmp_path) as engine:
        for version, transport in enumerate(("broadcast", "disk", "reshard", "reshard"), 1):
            model = models[version % 2]
            exchange = exchange_for(engine, source.load(model), transport, tmp_path)
            exchange.publish(version)
            assert_engine_computes_with(engine.info.url, model, version)
        wrong = r"rank 1: parameter model.embed_tokens.weight"
        for index, message in (  # rank 1 holds rows 160 to 299, and padding
            (0, rf"{wrong} does not hold .*weight \[160:300, 0:64\]"),
            (150 * 64, rf"{wrong}: elements that the loader sets to 0.0"),
        ):
            plant_fault(engine.info.url, 2, 1, "model.embed_tokens.weight", index)
            with pytest.raises(LeaderError, match=message):
                exchange.verify()
        exchange.close()
