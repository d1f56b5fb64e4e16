"""A publish reaches the draft's model of an engine, too, and its digests prove it: real engines that speculate."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_logprobs import logprob_difference, sampled
from engine_process import OneEngine
from test_exchange import PlainSource, exchange_for, experiment, plant_fault, started
from tiny_model import make_drafting_model

from megagrpo.mesh import LeaderError

pytestmark = [pytest.mark.timeout(900), pytest.mark.verifies("weights", "drafts arrive by every transport")]
DRAFTS = 2
DRAFT = "model.layers.2."  # the draft's HF tensors
LAYOUTS = {"glm4_moe": {"tp": 2, "ep": 2}, "deepseek_v3": {}, "glm4_moe_lite": {"tp": 2}}


@pytest.fixture(
    scope="module",
    params=["deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("glm4_moe", "glm4_moe_lite"))],
)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def models(family, model_of) -> list[Path]:
    return [model_of(make_drafting_model, family, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def engine(family, models, tmp_path_factory) -> Iterator[OneEngine]:
    """It starts with random weights, a draft's among them."""
    rollout = {"draft_tokens": DRAFTS, **LAYOUTS[family]}
    config = experiment(models[0], "reshard", rollout, actor={"draft": {}})
    with started(config, tmp_path_factory.mktemp("engine")) as engine:
        yield engine


def accepted(url: str) -> float:
    meta = [answer["meta_info"] for answer in sampled(url, 64)]
    return sum(m["spec_num_correct_drafts"] for m in meta) / sum(m["spec_num_proposed_drafts"] for m in meta)


def test_every_transport_reaches_the_draft(engine, models, tmp_path):
    source = PlainSource(models[0])
    assert sum(name.startswith(DRAFT) for name in source.hf_specs) > 30
    transports = ("reshard", "broadcast", "disk", "reshard changes")
    for version, transport in enumerate(transports, 1):
        model = models[version % 2]
        exchange = exchange_for(engine, source.load(model), transport, tmp_path)
        exchange.publish(version)
        exchange.verify()
        exchange.close()
        assert logprob_difference(engine.info.url, model, version).largest < 2e-5, "the samples are the model's"
        assert accepted(engine.info.url) > 0.2, f"after {transport} the draft proposes nothing of use"


def test_a_draft_of_older_weights_or_with_one_wrong_element_is_found_and_named(engine, family, models, tmp_path):
    source = PlainSource(models[0]).load(models[0])
    exchange = exchange_for(engine, source, "reshard", tmp_path)
    exchange.publish(10)
    new = PlainSource(models[1]).load(models[1])
    old = {name: tensor.clone() for name, tensor in source.live.items()}
    for name, tensor in source.live.items():
        if name.startswith(DRAFT):
            tensor.copy_(new.live[name])
    with pytest.raises(LeaderError) as stale:
        exchange.verify()
    text = str(stale.value)
    assert f"HF tensor {DRAFT}" in text and "parameter draft." in text and "parameter model." not in text
    for name, tensor in source.live.items():
        tensor.copy_(old[name])
    exchange.verify()
    tp = engine.config.rollout.tp
    plant_fault(engine.info.url, tp, tp - 1, "model.eh_proj.weight", 7)
    with pytest.raises(LeaderError, match=rf"rank {tp - 1}: parameter draft.model.eh_proj.weight does not hold"):
        exchange.verify()
    exchange.publish(11)  # heals
    exchange.verify()
    if family == "deepseek_v3":  # of one rank: latent attention computes with matrices made of a projection
        plant_fault(engine.info.url, 1, 0, "model.decoder.self_attn.w_kc", 3)
        with pytest.raises(LeaderError, match=r"draft.model.decoder.self_attn.w_kc: not what the live kv_b_proj"):
            exchange.verify()
    exchange.close()
