"""An engine that starts with random weights is, after a publish, the engine that reads the model when it starts."""

import sys
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from engine_process import OneEngine
from test_exchange import KEY, PROMPTS, PlainSource, exchange_for, experiment
from tiny_model import make_tied_model, make_tiny_model

from megagrpo.weights.transports import broadcast as transport_broadcast

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def started(model: Path, tp: int, load_format: str, folder: Path) -> OneEngine:
    config = experiment(model, tp, "broadcast")
    rollout = config.rollout.model_copy(update={"load_format": load_format})
    return OneEngine(config.model_copy(update={"rollout": rollout}), folder, [str(Path(__file__).parent)])


def greedy(engine: OneEngine) -> list:
    """Tokens and log-probabilities, in full precision."""
    sampling = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": PROMPTS, "return_logprob": True, "sampling_params": sampling}
    said = httpx.post(f"{engine.info.url}/generate", json=body, headers=KEY, timeout=120).raise_for_status().json()
    return [(out["output_ids"], out["meta_info"]["output_token_logprobs"]) for out in said]


@pytest.mark.parametrize(("make", "tp"), [(make_tiny_model, 1), (make_tied_model, 2)], ids=["moe", "dense tied tp2"])
def test_filled_by_a_publish_it_says_the_same(make, tp, tmp_path, monkeypatch):
    monkeypatch.setattr(transport_broadcast, "_ALONE_BYTES", 1)  # tensor by tensor; test_exchange packs them
    model = make(tmp_path / "model", 5)
    folders = {name: tmp_path / name for name in ("model_start", "dummy_start")}
    for folder in folders.values():
        folder.mkdir()
    reading = started(model, tp, "model", folders["model_start"])
    try:
        wanted = greedy(reading.start())
    finally:
        reading.stop()
    filled = started(model, tp, "dummy", folders["dummy_start"])
    try:
        before = greedy(filled.start())
        assert [tokens for tokens, _ in before] != [tokens for tokens, _ in wanted], "it has read no weights"
        for version, transport in enumerate(("reshard", "broadcast", "disk"), 1):
            if version > 1:
                filled.report_lost("e0", filled.info.incarnation)  # started again, with random weights again
                assert greedy(filled) == before
            exchange = exchange_for(filled, PlainSource(model).load(model), transport, tmp_path)
            exchange.publish(version)
            exchange.close()
            assert greedy(filled) == wanted, transport
    finally:
        filled.stop()
