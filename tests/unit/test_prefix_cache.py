"""Keys of the engines' prefix caches: a rollout keeps the one that it began with, a new one reads no older one."""

import pytest
from fake_service import FakeService, running
from sampling import Grader, experiment, source_of
from test_agents import EOS, TOKENIZER, ids, says

from megagrpo.algo.statistics import alone
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.tools import make_answering
from megagrpo.types import Prompt
from tests.experiments import until

BY_VERSION = {"prefix_cache": "by_version", "max_staleness": 1}
CORRECTED = {"mismatch": {"weight": {"name": "tis"}}}


@pytest.mark.parametrize("policy", ["by_version", "flush"])
def test_a_rollout_keeps_its_key_over_a_publish_and_a_new_one_has_the_next(policy):
    config = experiment(
        train={"group_size": 1},
        rollout=BY_VERSION | {"prefix_cache": policy},
        algorithm=CORRECTED | {"advantage": {"name": "reinforce_plus_plus"}},
        sampling={
            "max_response_tokens": 32,
            "stop_token_ids": [EOS],
            "environment": {"function": "tests.games:GuessTheNumber", "workers": 1},
        },
    )
    answering, published = make_answering(config, TOKENIZER), []
    prompts = [Prompt(n, "?", tuple(ids("?")), "7") for n in (30, 31)]
    decode = lambda tokens: TOKENIZER.decode(tokens, skip_special_tokens=True)  # noqa: E731
    script = [says("3") | {"cached_tokens": 0}, says("7") | {"cached_tokens": 3}, says("7") | {"cached_tokens": 0}]
    try:
        with running(FakeService(version=3, script=script)) as service:
            service.hang = lambda body: len(body["input_ids"]) > 1 and not published
            source = source_of(service.control, config, Grader(), decode, tool=answering)
            source.start(1, [0], prompts[:1], 3)
            until(lambda: len(service.requests) == 2, 20)
            service.version = 4  # a publish: the second turn is sampled by its weights
            published.append(4)
            [old] = source.next(1, prompts[:1], 4)
            source.start(2, [1], prompts[1:], 4)
            [new] = source.next(2, prompts[1:], 4)
            metrics = Metrics()
            source.add_metrics(metrics)
            source.close()
    finally:
        answering.close()
    assert (old.samples[0].weight_version, old.samples[0].newer) == (3, ((3, 4),)) and new.samples[
        0
    ].weight_version == 4
    keys = [request.get("extra_key") for request in service.requests]
    assert keys == (["weights 3", "weights 3", "weights 4"] if policy == "by_version" else [None] * 3)
    found = metrics.reduced(alone)
    read = sum(len(request["input_ids"]) for request in service.requests)
    assert found["prefix/hit_fraction"] == pytest.approx(3 / read)
    if policy == "by_version":
        assert found["prefix/on_older_keys_fraction"] == pytest.approx(2 / 6), "the second turn's two tokens"
    else:
        assert "prefix/on_older_keys_fraction" not in found
