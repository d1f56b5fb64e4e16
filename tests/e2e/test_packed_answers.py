"""A real engine answers /generate with packed arrays to whoever accepts them: the values of its JSON, bit for bit."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from engine_process import OneEngine
from tiny_model import make_tiny_model

from megagrpo.models.folder import Model
from megagrpo.rollout.answer_arrays import PACKED, is_packed, read_answer, read_experts, read_lists, read_pairs
from megagrpo.rollout.control import bearer
from megagrpo.rollout.generation import SamplingParams
from tests.experiments import experiment

pytestmark = pytest.mark.timeout(900)
PROMPT = [1, 5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[OneEngine]:
    """Deterministic, and it says its experts."""
    folder = tmp_path_factory.mktemp("packed")
    model = make_tiny_model(folder / "model")
    rollout = {"deterministic": True, "load_format": "model"}
    sections = {"model": {"path": str(model)}, "rollout": rollout, "actor": {"routing_replay": "rollout"}}
    engine = OneEngine(experiment(output_dir=str(folder), **sections), folder)
    try:
        yield engine.start()
    finally:
        engine.stop()


def ask(engine: OneEngine, accept: str, body: dict, key: bool = True) -> httpx.Response:
    headers = {"Accept": accept} | (bearer(engine.api_key) if key else {})
    # a key of its own: what a prefix cache holds changes what is computed
    body = body | {"extra_key": f"{accept} {sorted(body)}"}
    return httpx.post(f"{engine.info.url}/generate", json=body, headers=headers, timeout=400)


def body_of(**more) -> dict:
    params = SamplingParams(temperature=1.0, max_tokens=24).body(seed=7) | {"ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True} | more


REQUESTS = {
    "sampled": (body_of(return_routed_experts=True), {"output_token_logprobs": None}),
    "with candidates": (
        body_of(top_logprobs_num=5, logprob_start_len=1),
        {
            "output_token_logprobs": None,
            "output_top_logprobs": 0,
            "input_top_logprobs": 1,
            "input_token_logprobs": None,
        },
    ),
    "scored": (
        body_of(logprob_start_len=0, token_ids_logprob=[7, 8, 9])
        | {"sampling_params": {"max_new_tokens": 0, "temperature": 1.0}},
        {"input_token_logprobs": None, "input_token_ids_logprobs": 1},
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_packed_answers_hold_the_values_of_json(engine, name):
    body, fields = REQUESTS[name]
    answers = [ask(engine, accept, body).raise_for_status() for accept in (f"{PACKED}, application/json", "*/*")]
    assert [is_packed(answer.content) for answer in answers] == [True, False]
    assert answers[0].headers["content-type"] == PACKED
    (packed, arrays), (as_text, _) = (read_answer(answer.content) for answer in answers)
    packed, as_text = packed["meta_info"], as_text["meta_info"]
    for field, skipped in fields.items():
        if skipped is None:
            found, wanted = read_pairs(packed[field], arrays), read_pairs(as_text[field])
        else:
            k = body.get("top_logprobs_num", 3)
            found, wanted = read_lists(packed[field], k, skipped, arrays), read_lists(as_text[field], k, skipped)
        assert len(wanted[0]) and bytes(packed[field])[:1] == b"{", field
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes(), field
    plain = {
        "finish_reason",
        "weight_version",
        "weight_versions",
        "cached_tokens",
        "prompt_tokens",
        "completion_tokens",
    }
    assert all(packed.get(field) == as_text.get(field) for field in plain)
    if "return_routed_experts" in body:
        arch = Model.of(engine.config).arch
        number = len(PROMPT) + 24 - 1
        found = read_experts(arch, packed["routed_experts"], number, arrays)
        assert np.array_equal(found, read_experts(arch, as_text["routed_experts"], number)) and found.any()


def test_errors_aborts_lists_and_streams_are_as_before(engine):
    for body in (body_of(input_ids=[]), body_of(sampling_params={"temperature": -1})):
        refused = [ask(engine, accept, body) for accept in (PACKED, "*/*")]
        assert refused[0].status_code == refused[1].status_code == 400 and refused[0].content == refused[1].content
    assert ask(engine, PACKED, body_of(), key=False).status_code == 401
    several = ask(engine, PACKED, body_of(input_ids=[PROMPT, PROMPT[:3]])).json()
    assert [len(each["meta_info"]["output_token_logprobs"]) for each in several] == [24, 24]
    many = body_of(sampling_params=SamplingParams(1.0, 4).body(3) | {"n": 2})
    assert len(ask(engine, PACKED, many).json()) == 2
    streamed = ask(engine, PACKED, body_of(stream=True))
    assert streamed.content.startswith(b"data: {") and streamed.content.endswith(b"data: [DONE]\n\n")
    long = body_of(sampling_params=SamplingParams(1.0, 1500).body(5) | {"ignore_eos": True}, rid="long")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, engine, PACKED, long)
        while not waiting.done():
            headers = bearer(engine.api_key)
            httpx.post(f"{engine.info.url}/abort_request", json={"rid": "long"}, headers=headers, timeout=60)
        packed, arrays = read_answer(waiting.result().content)
    meta = packed["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    ids, logprobs = read_pairs(meta.get("output_token_logprobs", b"[]"), arrays)
    assert len(ids) == len(logprobs) < 1500
