"""Experts from an engine's answer to the batch: what is asked for, checked, kept, sent on, and refused beforehand."""

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from fake_service import FakeService, running
from sampling import MESH, evaluated, experiment, sampled
from sampling import source_of as make_source
from test_calculator import CALCULATOR, EOS, PROMPT, TOKENIZER, ids, says
from test_rollout_client import PARAMS, PROMPTS, QUICK

from examples.laptop.recipe import TinyModelConfig
from megagrpo.batching.batch import build_batch
from megagrpo.batching.updates import one_pass
from megagrpo.check.problems import layout_problems
from megagrpo.checkpoint.groups import read_groups, write_groups
from megagrpo.config.load import load_config
from megagrpo.models.architecture import Architecture
from megagrpo.models.config_json import Rotary
from megagrpo.models.fields import Kernels, transformer_defaults
from megagrpo.models.kinds.experts.describe import Experts
from megagrpo.models.kinds.grouped_query.describe import GroupedQuery
from megagrpo.models.table import architecture_of
from megagrpo.monitor.rollout_log import RolloutLog, read_rollouts
from megagrpo.rollout.admission import AdmissionQueue
from megagrpo.rollout.agents.answering import SamplePart
from megagrpo.rollout.agents.make import make_answering
from megagrpo.rollout.answer_arrays import WrongExperts, pack_answer, read_experts
from megagrpo.rollout.engine_choice import Engines
from megagrpo.rollout.generation import GenerationClient, GenerationFailed, SampleRequest, SamplingParams
from megagrpo.rollout.response import Response
from megagrpo.rollout.service.engine_command import ServerPlace, engine_settings
from megagrpo.rollout.source import RolloutSource
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.explain import explain
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
REPLAY = "actor.routing_replay=rollout"
MIXED = Architecture(
    family="glm4_moe",
    hidden_size=16,
    num_layers=3,
    ffn_size=32,
    vocab_size=64,
    max_positions=64,
    rms_eps=1e-6,
    tied=False,
    attention=GroupedQuery(heads=2, kv_heads=2, head_dim=8, rotary=Rotary(1e4)),
    experts=Experts(count=8, per_token=2, ffn_size=0, dense_layers=1),
)


def told(experts: np.ndarray) -> str:
    """As an engine does: base64 of int32."""
    return base64.b64encode(experts.astype("<i4").tobytes()).decode()


def quoted(text: str | None) -> bytes:
    return json.dumps(text).encode()


def drawn(num_tokens: int, spec: Architecture, seed: int = 0) -> np.ndarray:
    """[tokens, layers, k], the dense layers' rows 0 as SGLang leaves them."""
    scores = np.random.default_rng(seed).random((num_tokens, spec.num_layers, spec.experts.count))
    experts = scores.argsort(axis=2)[:, :, : spec.experts.per_token]
    experts[:, : spec.experts.dense_layers] = 0
    return experts


def test_experts_are_read_without_dense_layers_in_the_smallest_type():
    experts = drawn(5, MIXED)
    found = read_experts(MIXED, quoted(told(experts)), 5)
    assert found.dtype == np.uint8 and np.array_equal(found, experts[:, 1:])
    many = replace(MIXED, experts=replace(MIXED.routed, count=384))
    experts = drawn(50, many)
    assert experts.max() > 255 and np.array_equal(read_experts(many, quoted(told(experts)), 50), experts[:, 1:])


@pytest.mark.parametrize("packed", [False, True])
def test_a_later_turn_keeps_no_experts_of_earlier_ones(packed):
    experts = drawn(5, MIXED)
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "0", "routed_experts": told(experts)}
    answer = {"meta_info": meta | {"output_token_logprobs": [[-0.5, 7, None], [-0.5, 8, None]]}}
    body = pack_answer(answer) if packed else json.dumps(answer).encode()
    request = SampleRequest((1, 2, 3, 4), SamplingParams(1.0, 4), 0, experts_from=3)
    response = request.read(body, MIXED)
    found = response.routed_experts
    assert not any(np.shares_memory(array, np.frombuffer(body, np.uint8)) for array in (response.token_ids, found))
    assert np.array_equal(found, experts[3:, 1:])
    assert found.base is None and found.flags.writeable, "torch warns of others"


def test_wrong_experts_are_refused():
    right = drawn(5, MIXED)
    outside, negative, twice = right.copy(), right.copy(), right.copy()
    outside[2, 1, 0], negative[4, 2, 1], twice[3, 2] = 8, -1, 5
    one = replace(MIXED, experts=replace(MIXED.routed, per_token=1))
    for spec, text, message in (
        (MIXED, None, "holds no routed_experts"),
        (MIXED, "?", "no base64|not base64"),
        (MIXED, told(right[:4]), "24 numbers, not 5 tokens x 3 layers x 2"),
        (MIXED, told(outside), "ids from 0 to 8, and the model experts 0 to 7"),
        (MIXED, told(negative), "ids from -1"),
        (MIXED, told(twice), "an expert of layer 2 twice"),
        (MIXED, told(np.zeros_like(right)), "moe_runner_backend: triton"),  # a kernel that tells nobody
        (one, told(np.zeros((5, 3, 1))), "is 0 everywhere"),
    ):
        with pytest.raises(WrongExperts, match=message):
            read_experts(spec, msgspec.Raw(quoted(text)), 5)
    some = np.zeros((5, 3, 1))
    some[3, 2] = 1
    assert read_experts(one, quoted(told(some)), 5).sum() == 1, "0 is an expert"


def answered(script: list, experts_from: int) -> tuple[Response, list[dict], int]:
    async def run():
        engines = Engines.from_service(service.control)
        async with GenerationClient(engines, QUICK, AdmissionQueue(4), experts=MIXED) as client:
            return await client.generate(
                SampleRequest((5, 6, 7), PARAMS, 1234, experts_from=experts_from)
            ), client.num_retries

    with running(FakeService(script=script)) as service:
        response, retries = asyncio.run(run())
        return response, service.requests, retries


def test_experts_are_asked_for_from_a_token_on_and_wrong_ones_again():
    experts = drawn(6, MIXED)  # of 3 + 4 tokens the last was never read
    right, wrong = {"routed_experts": told(experts)}, {"routed_experts": told(experts[:3])}
    response, requests, retries = answered([wrong, {}, right], 2)
    assert np.array_equal(response.routed_experts, experts[2:, 1:]) and retries == 2
    assert all(request["return_routed_experts"] for request in requests)
    with pytest.raises(GenerationFailed, match="holds no routed_experts"):
        answered([{}] * 4, 0)


@pytest.fixture
def model(tmp_path) -> Path:
    description = hf_config(TinyModelConfig(path=str(tmp_path), family="deepseek_v3", num_layers=3))
    (tmp_path / "config.json").write_text(json.dumps(description))
    return tmp_path


@contextmanager
def source_of(model: Path, service: FakeService, **sampling) -> Iterator[RolloutSource]:
    config = experiment(
        model={"path": str(model)},
        train={"group_size": 1},
        algorithm={"advantage": {"name": "reinforce_plus_plus"}},
        actor={"routing_replay": "rollout"},
        sampling=sampling,
    )
    with (
        closing(make_answering(config, TOKENIZER)) as answering,
        running(service),
        closing(make_source(service.control, config, decode=lambda _: "1", answering=answering)) as source,
    ):
        yield source


def test_every_turn_goes_on_where_the_experts_end(model: Path):
    spec = architecture_of(json.loads((model / "config.json").read_text()))
    turns = [ids("<48/2>"), ids("1", end=True)]
    prompt = len(PROMPT.token_ids)
    first = prompt + len(turns[0]) - 1
    whole = prompt + len(turns[0]) + len(ids("1")) + len(turns[1]) - 1
    experts = drawn(whole, spec)
    script = [
        says("<48/2>") | {"routed_experts": told(experts[:first])},
        says("1", end=True) | {"routed_experts": told(experts)},
    ]
    one = CALCULATOR | {"function": "tests.games:SaysOneOnce"}
    sampling = {"max_response_tokens": 32, "stop_token_ids": [EOS], "environment": one}
    with source_of(model, FakeService(version=3, script=script), **sampling) as source:
        [group] = sampled(source, 7, [PROMPT], 3)
    assert np.array_equal(group.samples[0].routed_experts, experts[:, 1:])


def test_experts_of_turns_are_copied_once():
    """Not at every turn, which would take the square of the number of turns."""
    chance, part = np.random.default_rng(0), SamplePart(None)
    turns = [
        Response([1, 2], [-1, -1], "stop", 0, routed_experts=chance.integers(0, 8, (2, 3, 2)).astype(np.uint8))
        for _ in range(3)
    ]
    for turn in turns:
        part.add(turn, sampled=True)
    assert all(kept is turn.routed_experts for kept, turn in zip(part.experts, turns, strict=True))
    assert part.response.routed_experts is None and len(part.response.token_ids) == 6
    assert np.array_equal(part.routed_experts, np.concatenate([turn.routed_experts for turn in turns]))


def test_evaluation_and_greedy_baselines_ask_for_none(model: Path):
    service = FakeService(version=3)
    with source_of(model, service) as source:
        evaluated(source, PROMPTS[:1], 3, SamplingParams(1.0, 4), 1)
    assert service.requests and not any("return_routed_experts" in request for request in service.requests)


def groups_with_experts() -> list[RolloutGroup]:
    prompt, rest = Prompt(0, "", (1, 2, 3), ""), ("stop", 0, "")
    samples = [Sample(i, range(n), [-0.5] * n, *rest) for i, n in enumerate((4, 2, 3))]
    known = [
        replace(s, routed_experts=drawn(2 + len(s.token_ids), MIXED, i)[:, 1:].astype(np.uint8))
        for i, s in enumerate(samples[:2])
    ]
    return [RolloutGroup(0, prompt, (*known, samples[2]), (Outcome("score", 1.0),) * 3)]


def test_the_batch_has_experts_of_its_own_layers():
    [group] = groups = groups_with_experts()
    batch = build_batch(groups, one_pass(1), MESH, routed_layers=(1,))
    assert batch.routing.experts.shape == (7 + 5 + 6, 1, 2) and batch.routing.experts.dtype == torch.uint8
    assert batch.routing.lengths.tolist() == [6, 4, 0], "of all tokens but the last; of the last sample none are known"
    for row, length in enumerate(batch.routing.lengths.tolist()):
        found = batch.routing.experts.split(batch.lengths.tolist())[row].numpy()
        assert not found[length:].any()
        if length:
            assert np.array_equal(found[:length], group.samples[row].routed_experts[:, [1]])
    nobody_asks = build_batch(groups, one_pass(1), MESH)
    assert nobody_asks.routing is None


def test_ranks_that_do_not_sample_get_tokens_without_experts_and_texts():
    groups = [replace(g, samples=tuple(replace(s, text="said") for s in g.samples)) for g in groups_with_experts()]
    group = groups[0].for_other_ranks()
    assert all(s.routed_experts is None and s.text == "" for s in group.samples)
    restored = zip(group.samples, groups[0].samples, strict=True)
    assert (
        replace(group, samples=tuple(replace(s, routed_experts=o.routed_experts, text="said") for s, o in restored))
        == (groups[0])
    )


def test_checkpoints_keep_experts_and_logs_do_not(tmp_path: Path):
    groups = groups_with_experts()
    write_groups(tmp_path / "ahead.npz", groups)
    found = read_groups(tmp_path / "ahead.npz")
    assert found == groups and found[0].samples[0].routed_experts.dtype == np.uint8
    log = RolloutLog(RunFolder(tmp_path), 0)
    log.write(1, groups)
    log.close()
    assert "routed" not in json.dumps(list(read_rollouts(RunFolder(tmp_path).rollout_files()[1].values())))


def test_who_replays_has_experts_no_fused_router_and_engines_that_tell():
    config = load_config(str(CONFIG), [REPLAY])
    dense, moe = (architecture_of(hf_config(TinyModelConfig(path="x", family=f))) for f in ("qwen3", "qwen3_moe"))
    assert "actor.routing_replay: a qwen3 model has no experts to route to; remove it" in layout_problems(
        dense, config.actor
    )
    assert layout_problems(moe, config.actor) == []
    mixtral = architecture_of(hf_config(TinyModelConfig(path="x", family="mixtral")))
    assert "SGLang's Mixtral does not say which layer" in layout_problems(mixtral, config.actor)[0]
    old = config.actor.model_copy(update={"routing_replay": "old"})
    assert layout_problems(mixtral, old) == []
    gpu = Kernels(cuda=True, transformer_engine=True, fused_weight_gradient=False)
    fused = {
        replay: transformer_defaults(moe, config.actor.model_copy(update={"routing_replay": replay}), gpu)
        for replay in (None, "old")
    }
    assert "moe_router_fusion" in fused[None] and "moe_router_fusion" not in fused["old"]
    place = ServerPlace(0, "127.0.0.1", 1, "", cuda=True, num_cores=1)
    assert engine_settings(config, place)["enable_return_routed_experts"] is True
    assert engine_settings(config, place)["moe_runner_backend"] == "triton", "others choose experts inside their kernel"
    assert "enable_return_routed_experts" not in engine_settings(load_config(str(CONFIG), []), place)


def test_check_says_what_experts_cost(model: Path):
    """Here of two layers with experts, of three."""
    settings = [f"model.path={model}", "sft=null"]
    k = architecture_of(json.loads((model / "config.json").read_text())).routed.per_token
    text = explain(load_config(str(CONFIG), [*settings, REPLAY]))
    assert f"the actor takes the engine's experts: {2 * k} bytes a token of a replica, {16 * k} in an answer" in text
    assert f"{12 * k} of an engine rank's host memory" in text and "enable_return_routed_experts" in text
    old = explain(load_config(str(CONFIG), [*settings, "actor.routing_replay=old"]))
    assert f"experts of the old log-probabilities: {2 * k} bytes" in old and "enable_return_routed_experts" not in old
