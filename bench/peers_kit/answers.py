"""Answers of an engine: from the text of SGLang's /generate to token ids and log-probabilities."""

import json
import pickle

import numpy as np
import torch

from megagrpo.rollout.generation import SampleRequest, SamplingParams
from peers_kit.measure import OURS, Call, Cases
from peers_kit.work import LIMIT, PROMPT, scaled

CASES = Cases()
ITEM = "reading answers"
NUM_ANSWERS, TOKENS, DISTINCT = scaled(16), 32_768, 4


def _bodies() -> list[bytes]:
    made = []
    for seed in range(DISTINCT):
        chance = np.random.default_rng(seed)
        ids = (300 + 128_000 * chance.power(0.35, TOKENS)).astype(np.int64).tolist()
        logprobs = np.log(chance.power(4.0, TOKENS)).astype(np.float32)
        logprobs[chance.random(TOKENS) < 0.2] *= np.float32(1e-5)
        meta = {
            "id": f"{seed:032x}",
            "finish_reason": {"type": "length", "length": TOKENS},
            "prompt_tokens": PROMPT,
            "weight_version": "0",
            "input_token_logprobs": [],
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(logprobs.tolist(), ids, strict=True)
            ],
            "completion_tokens": TOKENS,
            "cached_tokens": 0,
            "e2e_latency": 100.5,
        }
        body = {"text": " wait" * TOKENS, "output_ids": ids, "meta_info": meta}
        made.append(json.dumps(body, separators=(",", ":")).encode())
    return [made[i % DISTINCT] for i in range(NUM_ANSWERS)]


@CASES.add(ITEM, OURS)
def _ours() -> Call:
    bodies = _bodies()
    params = SamplingParams(1.0, TOKENS)
    request = SampleRequest(np.zeros(PROMPT, np.int32), params, 0)

    def call():
        read = [request.read(body, None) for body in bodies]
        sums = [[r.token_ids.sum(), r.logprobs.sum(dtype=np.float64)] for r in read]
        return np.array(sums), {"answers": len(read), "MB each": round(len(bodies[0]) / 1e6, 2)}

    return call


@CASES.add(ITEM, "slime")
def _slime() -> Call:
    """http_utils.post: response.json(); then two list comprehensions, which stay lists."""
    bodies = _bodies()

    def call():
        kept = []
        for body in bodies:
            output = json.loads(body)
            pairs = output["meta_info"]["output_token_logprobs"]
            tokens = [item[1] for item in pairs]
            kept.append((tokens, [item[0] for item in pairs], [1] * len(tokens), output["text"]))
        sums = [[sum(t), np.array(v, np.float32).sum(dtype=np.float64)] for t, v, *_ in kept]
        return np.array(sums), {}

    return call


@CASES.add(ITEM, "verl")
def _verl() -> Call:
    """Its engine is in the Ray actor, so there is no JSON: lists, pydantic, pickle, tensors."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
    from verl.workers.rollout.replica import TokenOutput

    bodies = _bodies()
    distinct = [json.loads(body) for body in bodies[:DISTINCT]]
    outputs = [distinct[i % len(distinct)] for i in range(len(bodies))]
    prompt = list(range(1, PROMPT + 1))

    def call():
        fields = []
        for output in outputs:
            # async_sglang_server.py generate, and the Ray call
            pairs = output["meta_info"]["output_token_logprobs"]
            sent = TokenOutput(
                token_ids=list(output["output_ids"]),
                log_probs=[float(value) for value, _, _ in pairs],
            )
            got = pickle.loads(pickle.dumps(sent, 5))
            # single_turn_agent_loop.py, agent_loop_tq.py
            loop = AgentLoopOutput(
                prompt_ids=prompt,
                response_ids=got.token_ids[:LIMIT],
                response_mask=[1] * len(got.token_ids),
                response_logprobs=got.log_probs[:LIMIT],
                metrics=AgentLoopMetrics(),
            )
            whole = torch.cat((torch.tensor(loop.prompt_ids), torch.tensor(loop.response_ids)))
            field = loop.as_dict()
            field["loss_mask"] = field["response_mask"]
            field["input_ids"] = whole
            field["position_ids"] = torch.arange(len(whole))
            fields.append(field)
        sums = [
            [int(f["responses"].sum()), float(f["rollout_log_probs"].double().sum())]
            for f in fields
        ]
        return np.array(sums), {}

    return call
