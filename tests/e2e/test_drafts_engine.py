"""Engines that draft tokens by the model's own additional layer: what they answer is the model's, only sooner."""

import base64
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from engine_logprobs import logits_by
from engine_process import OneEngine
from tiny_model import make_drafting_model

from megagrpo.rollout.control import bearer
from megagrpo.rollout.generation import SamplingParams
from tests.experiments import experiment

pytestmark = pytest.mark.timeout(900)
PROMPT = [1, 5, 6, 7, 8, 9]
NUM_SAMPLES, NEW_TOKENS = 3000, 6


@contextmanager
def started(folder: Path, table: dict[str, tuple[Path, bool, int | None]]) -> Iterator[dict[str, OneEngine]]:
    """Engines of models, deterministic or not, with so many drafts for each forward; the latter say their experts."""
    with ExitStack() as stack:
        found = {}
        for name, (model, deterministic, drafts) in table.items():
            rollout = {"deterministic": deterministic, "load_format": "model", "draft_tokens": drafts}
            actor = {"draft": {}} | ({"routing_replay": "rollout"} if deterministic else {})
            config = experiment(output_dir=str(folder), model={"path": str(model)}, rollout=rollout, actor=actor)
            found[name] = OneEngine(config, folder, id=name)
            stack.callback(found[name].stop)
            found[name].begin_start()
        yield {name: engine.finish_start() for name, engine in found.items()}


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Iterator[dict[str, OneEngine]]:
    """GLM-4.5 with drafts and without, deterministic."""
    folder = tmp_path_factory.mktemp("drafts")
    model = make_drafting_model(folder / "model", "glm4_moe")
    with started(folder, {"drafting": (model, True, 3), "plain": (model, True, None)}) as found:
        yield found


def post(engine: OneEngine, path: str, **body):
    headers = bearer(engine.api_key)
    return httpx.post(engine.info.url + path, json=body, headers=headers, timeout=400).raise_for_status().json()


def generate(engine: OneEngine, prompts: list[list[int]], seeds: range | list[int], **params) -> list[dict]:
    """As GenerationClient asks, but without an end of the text, unless one is in params."""
    more = {"ignore_eos": "stop_token_ids" not in params}
    sampling = [SamplingParams(**params).body(seed) | more for seed in seeds]
    asked = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    return post(engine, "/generate", **asked, return_routed_experts=True)


def logprobs(answer: dict, of: str = "output") -> np.ndarray:
    return np.array([entry[0] for entry in answer["meta_info"][f"{of}_token_logprobs"]], dtype=np.float64)


def experts(answer: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)


def acceptance(answers: list[dict]) -> float:
    drafts = [(x["meta_info"]["spec_num_correct_drafts"], x["meta_info"]["spec_num_proposed_drafts"]) for x in answers]
    accepted, proposed = np.array(drafts).sum(0)
    return accepted / proposed


def some_prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[1, *(draw.randrange(3, 320) for _ in range(draw.randrange(3, 60)))] for _ in range(count)]


def as_read_by(engine: OneEngine, prompts: list[list[int]], answers: list[dict]) -> list[dict]:
    """The engine's answers to prompts and responses together: it reads these tokens at once and drafts none."""
    whole = [prompt + answer["output_ids"] for prompt, answer in zip(prompts, answers, strict=True)]
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    body = {"input_ids": whole, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    return post(engine, "/generate", **body, return_routed_experts=True)


def assert_own_logprobs(engine: OneEngine, prompts: list[list[int]], answers: list[dict]) -> None:
    for prompt, answer, read in zip(prompts, answers, as_read_by(engine, prompts, answers), strict=True):
        assert np.abs(logprobs(answer) - logprobs(read, "input")[len(prompt) :]).max() < 1e-5


def test_greedy_answers_and_experts_are_those_without_drafts(engines):
    prompts = some_prompts(24)
    sampling = {"max_new_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True, "return_routed_experts": True}
    with_drafts, without = (post(engines[name], "/generate", **body) for name in ("drafting", "plain"))
    for one, other in zip(with_drafts, without, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert np.abs(logprobs(one) - logprobs(other)).max() < 1e-5
        assert np.array_equal(experts(one), experts(other))
        assert not [key for key in other["meta_info"] if key.startswith("spec_")]
    assert 0.2 < acceptance(with_drafts) < 0.9, "else drafts would not be tested"


def test_a_chain_ends_where_the_response_does(engines):
    engine, prompt = engines["drafting"], some_prompts(1)
    [whole] = generate(engine, prompt, [0], temperature=0.0, max_tokens=64)
    tokens = whole["output_ids"]
    for length in range(1, 8):
        [answer] = generate(engine, prompt, [0], temperature=0.0, max_tokens=length)
        assert answer["output_ids"] == tokens[:length] and len(logprobs(answer)) == length
        end = tokens.index(tokens[length])
        [answer] = generate(engine, prompt, [0], temperature=0.0, max_tokens=64, stop_token_ids=(tokens[length],))
        assert answer["output_ids"] == tokens[: end + 1] and len(logprobs(answer)) == end + 1
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[length]}


def test_the_same_seeds_give_the_same_samples_in_any_company(engines):
    engine, prompts = engines["drafting"], some_prompts(16, 1)
    together = generate(engine, prompts, range(16), temperature=1.0, max_tokens=40)
    for number in range(8):
        [alone] = generate(engine, [prompts[number]], [number], temperature=1.0, max_tokens=40)
        assert alone["output_ids"] == together[number]["output_ids"]
        assert np.array_equal(logprobs(alone), logprobs(together[number])), "bit for bit"
    assert_own_logprobs(engines["plain"], prompts, together)
    for answer, read in zip(together, as_read_by(engines["plain"], prompts, together), strict=True):
        assert np.array_equal(experts(answer), experts(read)[: len(experts(answer))])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_have_the_distribution_of_the_model(engines, temperature):
    assert_distribution(engines["drafting"], temperature)


@pytest.mark.slow
def test_samples_have_the_distribution_of_a_model_with_latent_attention(tmp_path):
    model = make_drafting_model(tmp_path / "model", "deepseek_v3")
    with started(tmp_path, {"deepseek": (model, False, 1)}) as found:
        assert_distribution(found["deepseek"], 1.0)


def assert_distribution(engine: OneEngine, temperature: float) -> None:
    """With the exact probability of every token after its prefix, u = P(smaller token) + v P(token) is uniform and
    independent of the u before, for uniform v. A greedy verifier fails by far: its tokens are the likely ones."""
    params = {"temperature": temperature, "max_tokens": NEW_TOKENS}
    answers = generate(engine, [PROMPT] * NUM_SAMPLES, range(NUM_SAMPLES), **params)
    tokens = torch.tensor([answer["output_ids"] for answer in answers])
    rows = torch.cat([torch.tensor(PROMPT).expand(NUM_SAMPLES, -1), tokens], 1)
    logits = logits_by(engine.config.model.path, rows)[:, len(PROMPT) - 1 : -1].double() / temperature
    exact = logits.log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]
    assert np.abs(exact.numpy() - np.stack([logprobs(answer) for answer in answers])).max() < 2e-5
    assert 0.1 < acceptance(answers) < 0.9
    probabilities, places = logits.softmax(-1).sort(-1, descending=True)
    rank = (places == tokens[:, :, None]).int().argmax(-1, keepdim=True)
    own, to_here = (x.gather(2, rank)[:, :, 0] for x in (probabilities, probabilities.cumsum(-1)))
    u = to_here - own * torch.rand(own.shape, generator=torch.Generator().manual_seed(0), dtype=own.dtype)
    sixth = (6 * u).long().clamp(0, 5)
    for position in range(NEW_TOKENS - 1):
        pairs = 6 * sixth[:, position] + sixth[:, position + 1]
        expected = NUM_SAMPLES / 36
        chi_squared = float(((pairs.bincount(minlength=36) - expected) ** 2 / expected).sum())
        assert chi_squared < 80.0, f"{position}: of 35 degrees of freedom, by chance one in 40,000"


def test_top_k_and_greedy_requests_share_a_batch(engines):
    engine, prompt = engines["drafting"], some_prompts(1)[0]
    [greedy] = generate(engine, [prompt], [0], temperature=0.0, max_tokens=16)
    sampling = [{"max_new_tokens": 16, "temperature": 0.0}, {"max_new_tokens": 16, "sampling_seed": 7}]
    sampling += [{"max_new_tokens": 16, "top_k": 3, "top_p": 0.8, "sampling_seed": seed} for seed in range(30)]
    body = {"input_ids": [prompt] * 32, "sampling_params": sampling, "return_logprob": True}
    answers = post(engine, "/generate", **body)
    assert answers[0]["output_ids"] == greedy["output_ids"]
    for answer in answers[2:]:
        row = torch.tensor([prompt + answer["output_ids"]])
        logits = logits_by(engine.config.model.path, row)[0, len(prompt) - 1 : -1]
        likely = logits.topk(3).indices
        assert (likely == torch.tensor(answer["output_ids"])[:, None]).any(1).all()
    assert len({tuple(answer["output_ids"]) for answer in answers[2:]}) > 10


def test_a_pause_between_chains(engines):
    engine, prompts, found = engines["drafting"], some_prompts(12, 2), []

    def sample() -> None:
        found.extend(generate(engine, prompts, range(12), temperature=1.0, max_tokens=150))

    thread = threading.Thread(target=sample)
    thread.start()
    time.sleep(0.8)
    post(engine, "/pause_generation", mode="retract")
    post(engine, "/continue_generation")
    thread.join()
    reasons = {answer["meta_info"]["finish_reason"]["type"] for answer in found}
    assert reasons == {"length"}
    assert {answer["meta_info"]["num_retractions"] for answer in found} == {1}, "the pause came too late"
    assert_own_logprobs(engines["plain"], prompts, found)
