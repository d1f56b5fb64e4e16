"""Log-probabilities are read from an answer as a parser of JSON reads them, bit for bit."""

import asyncio
import json
from contextlib import AsyncExitStack

import numpy as np
import orjson
import pytest
from aiohttp import web

from megagrpo.rollout.admission import AdmissionQueue
from megagrpo.rollout.answer_arrays import PACKED, is_packed, pack_answer, read_answer, read_lists, read_pairs
from megagrpo.rollout.engine_choice import Engines
from megagrpo.rollout.generation import (
    GenerationClient,
    GenerationFailed,
    RetryPolicy,
    SampleRequest,
    SamplingParams,
    UnusableAnswer,
)
from megagrpo.types import EngineInfo

chance = np.random.default_rng(0)
SIZE = 5000
VALUES = {
    "usual": np.log(chance.random(SIZE)),
    "of every size": -chance.random(SIZE) * 10.0 ** chance.integers(-38, 3, SIZE),
    "certain": np.where(chance.random(SIZE) < 0.5, 0.0, -0.0),
    "powers of ten": -(10.0 ** chance.integers(-38, 3, SIZE).astype(float)),
    "subnormal": chance.normal(size=SIZE) * 10.0 ** chance.integers(-44, -37, SIZE),
    "positive": chance.normal(size=SIZE) * 100,
    "one": np.array([-0.5]),
}


def by_json(text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """(ids, log-probabilities) by Python's own parser."""
    pairs = json.loads(text) or []
    ids = np.array([pair[1] for pair in pairs], np.int32)
    return ids, np.array([pair[0] for pair in pairs], np.float64).astype(np.float32)


def same_bits(found: tuple[np.ndarray, ...], wanted: tuple[np.ndarray, ...]) -> bool:
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))


def written(values: np.ndarray) -> bytes:
    """The list as SGLang writes it: float32 as the double that it is."""
    ids = chance.integers(0, 10 ** chance.integers(1, 8, len(values)))
    pairs = zip(values.astype(np.float32).tolist(), ids.tolist(), strict=True)
    return orjson.dumps([[logprob, token, None] for logprob, token in pairs])


@pytest.mark.parametrize("name", VALUES)
def test_same_bits_as_a_parser(name):
    text = written(VALUES[name])
    assert same_bits(read_pairs(text), by_json(text))


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"[[null,5,null],[-0.5,6,null]]",
        b"[[-0.5, 5, null], [-0.25, 6, null]]",
        b"[[-1,5,null],[-2,6,null]]",
        b"[[-1e-7,5,null],[-1E+1,6,null]]",
        b"[[-1234.5,5,null]]",
        b"[[-0.5,123456789,null]]",
    ],
)
def test_spaces_and_numbers_of_every_form(text):
    assert same_bits(read_pairs(text), by_json(text))


@pytest.mark.parametrize(
    "text", [b"[[-0.5,x,null]]", b"[[-0.5", b'[["a",5,null]]', b"[5]", b"{}1", b'[[-0.5,5," a"]]', b"[[-0.5,5,true]]"]
)
def test_nonsense_is_an_error(text):
    with pytest.raises((ValueError, TypeError, IndexError, KeyError)):
        read_pairs(text)


TOP = [[[-0.5, 7, None], [-1.5, 8, None]], [[-1e-7, 9, None], [None, 5, None]], [[-2.0, 3, None], [-3.0, 4, None]]]


def test_candidates_are_read_behind_the_positions_that_have_none():
    for lists, skipped in (([], 0), ([None], 1)):
        assert read_lists(orjson.dumps(lists), 2, skipped)[0].shape == (0, 2)
    for lists, skipped in ((TOP, 0), ([None, *TOP], 1)):
        ids, logprobs = read_lists(orjson.dumps(lists), 2, skipped)
        assert ids.tolist() == [[7, 8], [9, 5], [3, 4]] and np.isnan(logprobs[1, 1])


@pytest.mark.parametrize("lists", [[TOP[0], TOP[1][:1]], [TOP[0], None], [None, *TOP]])
def test_other_numbers_of_candidates_are_an_error(lists):
    with pytest.raises(ValueError, match="not 2 tokens for every position"):
        read_lists(orjson.dumps(lists), 2)


def test_an_answer_with_all_that_sglang_may_add():
    pairs = [[-0.25, 7, None], [-1.1920928244535389e-7, 8, None]]
    meta = {
        "id": "a",
        "finish_reason": {"type": "stop", "matched": 8},
        "prompt_tokens": 2,
        "weight_version": "3",
        "weight_versions": [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1}],
        "input_token_logprobs": [[None, 5, None], [-0.5, 6, None]],
        "input_top_logprobs": [None, [[-0.5, 6, None]]],
        "output_top_logprobs": [[[-0.25, 7, None], [-2.0, 9, None]], None],
        "output_token_logprobs": pairs,
        "output_token_logprobs_length": 2,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "cached_tokens_details": {"device": 1},
        "spec_correct_drafts_histogram": [0, 2],
        "routed_experts": "AAAA",
        "e2e_latency": 0.5,
    }
    said = '"output_token_logprobs":[[-9.0,9,null]] \n é'
    text = orjson.dumps({"text": said, "output_ids": [7, 8], "meta_info": meta})
    request = SampleRequest((5, 6), SamplingParams(1.0, 4), 0, version=2, or_newer=True)
    response = request.read(text, None)
    assert response.token_ids.tolist() == [7, 8]
    assert response.logprobs.tobytes() == np.array([p[0] for p in pairs], np.float32).tobytes()
    assert (response.weight_version, response.newer) == (2, ((1, 3),))
    assert (response.num_cached, response.accepted) == (1, (0, 2))


def test_a_sampled_token_without_a_finite_log_probability_is_sampled_again():
    """An engine writes NaN as null; in a batch it would cost the whole update."""
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "2", "output_token_logprobs": [[None, 7, None]]}
    request = SampleRequest((5, 6), SamplingParams(1.0, 4), 0, version=2)
    with pytest.raises(UnusableAnswer, match="not finite"):
        request.read(orjson.dumps({"meta_info": meta}), None)


def test_a_response_for_which_an_engine_has_no_room_ends_the_run():
    """SGLang lowers the limit of a request to what its caches hold, without a word."""
    rows = [[-0.5, 7, None]] * 20
    meta = {"finish_reason": {"type": "length"}, "weight_version": "2", "output_token_logprobs": rows}
    body = orjson.dumps({"meta_info": meta})
    for most in (20, 27):  # before the model's last position it ends a little earlier
        request = SampleRequest((5, 6), SamplingParams(1.0, most), 0, version=2)
        assert len(request.read(body, None).token_ids) == 20
    with pytest.raises(GenerationFailed, match="cut a response after 20 of 28 tokens: its caches"):
        SampleRequest((5, 6), SamplingParams(1.0, 28), 0, version=2).read(body, None)


def through(answer: dict, packed: bool) -> tuple[dict, memoryview]:
    """(fields, arrays) of an answer in either form, as a client gets it."""
    answer["meta_info"] = {"weight_version": "1", "finish_reason": None} | answer["meta_info"]
    body = pack_answer(answer) if packed else orjson.dumps(answer)
    assert is_packed(body) == packed
    read, arrays = read_answer(body)
    return read["meta_info"], arrays


@pytest.mark.parametrize("name", VALUES)
def test_packed_answers_have_the_bits_of_text(name):
    values = VALUES[name].astype(np.float32)
    rows = [(value, number, None) for number, value in enumerate(values.tolist())]
    rows[0] = (None, *rows[0][1:])
    for strange in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        rows.append((strange, 7, None))
    lists = [None, *(rows[i : i + 4] for i in range(0, len(rows) - 4, 4))]
    meta = {"output_token_logprobs": rows, "input_token_ids_logprobs": lists, "output_top_logprobs": lists[1:]}
    answer = {"text": "said", "output_ids": [1], "meta_info": meta}
    (as_text, _), (packed, arrays) = through(answer, False), through(answer, True)
    assert packed["finish_reason"] is None and len(arrays) >= 24 * len(values)
    found = read_pairs(packed["output_token_logprobs"], arrays)
    assert same_bits(found, read_pairs(as_text["output_token_logprobs"]))
    for field, skipped in (("output_top_logprobs", 0), ("input_token_ids_logprobs", 1)):
        if len(lists) > 1:
            found = read_lists(packed[field], 4, skipped, arrays)
            assert same_bits(found, read_lists(as_text[field], 4, skipped)) and found[0].shape[1:] == (4,)
        with pytest.raises(ValueError, match="not 3 tokens for every position"):
            read_lists(packed[field] if len(lists) > 1 else b"[[]]", 3, skipped, arrays)


@pytest.mark.parametrize("lists", [[], [None], None, [TOP[0], TOP[1][:1]], [TOP[0], None], [None, *TOP], TOP])
@pytest.mark.parametrize("skipped", [0, 1])
def test_packed_candidates_of_every_form_are_read_or_refused_as_in_text(lists, skipped):
    answer = {"meta_info": {"output_top_logprobs": lists}}
    found = []
    for packed in (False, True):
        meta, arrays = through(answer, packed)
        try:
            found.append(read_lists(meta["output_top_logprobs"], 2, skipped, arrays))
        except (TypeError, ValueError) as exc:
            found.append(type(exc))
    if isinstance(found[0], type):
        assert found[0] is found[1]
    else:
        assert same_bits(*found) and found[0][0].shape == found[1][0].shape


def test_a_packed_answer_that_is_cut_off_is_tried_again():
    rows = [(-0.5, 5, None)] * 100
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "2", "output_token_logprobs": rows}
    body, request = pack_answer({"meta_info": meta}), SampleRequest((5, 6), SamplingParams(1.0, 4), 0, version=2)
    whole = request.read(body, None)
    assert len(whole.token_ids) == 100 and np.shares_memory(whole.token_ids, np.frombuffer(body, np.uint8))
    for length in (7, 12, 40, len(body) - 8):
        with pytest.raises(UnusableAnswer):
            request.read(body[:length], None)


def test_a_client_asks_for_packed_answers_and_takes_any():
    accepted = []

    async def generate(request: web.Request) -> web.Response:
        accepted.append(request.headers["Accept"])
        rows = [(-0.25, 7, None)] * 20_000
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "2", "output_token_logprobs": rows}
        if len(accepted) == 1:
            return web.Response(body=pack_answer({"meta_info": meta}), content_type=PACKED)
        return web.json_response({"meta_info": meta})

    async def both() -> list:
        app = web.Application()
        app.add_routes([web.post("/generate", generate)])
        async with AsyncExitStack() as stack:
            runner = web.AppRunner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
            engine = EngineInfo("engine-0", url, "ready", 2, 1, 0, 1, "", serves=True)
            engines = Engines(lambda: [engine], "a key")
            client = GenerationClient(engines, RetryPolicy(0, 30.0), AdmissionQueue(4))
            await stack.enter_async_context(client)
            request = SampleRequest((5, 6), SamplingParams(1.0, 4), 0, version=2)
            return [await client.generate(request) for _ in range(2)]

    packed, as_text = asyncio.run(both())
    assert packed == as_text and len(packed.token_ids) == 20_000
    assert accepted == [f"{PACKED}, application/json"] * 2
