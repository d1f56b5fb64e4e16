"""The samples of a step on their way between processes: bytes, and packing and unpacking them."""

import pickle

import numpy as np
import torch

from megagrpo.batching.sample_rows import NO_NEEDS, rows_of
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample
from peers_kit.measure import OURS, Call, Cases
from peers_kit.work import (
    GROUP,
    LIMIT,
    NUM_RESPONSES,
    PROMPT,
    response_lengths,
    response_rewards,
)

CASES = Cases()
ITEM = "a step's samples on their way"
WORKERS = 8  # agent-loop workers of verl


def _groups() -> list[RolloutGroup]:
    lengths = response_lengths().tolist()
    chance = np.random.default_rng(7)
    rewards = response_rewards(len(lengths))
    groups = []
    for g in range(len(lengths) // GROUP):
        prompt = Prompt(g, "a question", chance.integers(0, 150_000, PROMPT), "an answer")
        samples = []
        for i, length in enumerate(lengths[g * GROUP : (g + 1) * GROUP]):
            ids, logprobs = chance.integers(0, 150_000, length), np.log(chance.power(4.0, length))
            samples.append(Sample(i, ids, logprobs, "stop", 0, ""))
        outcomes = [Outcome("score", float(r)) for r in rewards[g * GROUP : (g + 1) * GROUP]]
        groups.append(RolloutGroup(g, prompt, tuple(samples), tuple(outcomes)))
    return groups


def _sent(data: bytes, times: int = 1) -> dict[str, object]:
    return {"MB": round(len(data) * times / 1e6, 1)}


@CASES.add(ITEM, OURS)
def _ours() -> Call:
    """As mesh.exchange sends a rank's rows."""
    groups = _groups()

    def call():
        experts = [None] * GROUP
        rows = [row for group in groups for row in rows_of(group, GROUP, None, experts, NO_NEEDS)]
        sent = pickle.dumps(rows)
        pickle.loads(sent)
        return None, _sent(sent)

    return call


@CASES.add(ITEM, "verl (V0, one of 8 workers)")
def _verl_padded() -> Call:
    """DataProto of AgentLoopWorker._postprocess, for one worker's share of the step."""
    from tensordict import TensorDict
    from verl import DataProto

    lengths = response_lengths()[: max(NUM_RESPONSES // WORKERS, 1)]
    number = len(lengths)
    mask = (torch.arange(LIMIT)[None] < torch.from_numpy(lengths)[:, None]).long()
    prompts = torch.ones(number, PROMPT, dtype=torch.int64)
    responses = torch.ones(number, LIMIT, dtype=torch.int64)
    attention = torch.cat((torch.ones_like(prompts), mask), 1)
    fields = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "input_ids": torch.cat((prompts, responses), 1),
        "attention_mask": attention,
        "position_ids": attention.cumsum(1) - 1,
        "rollout_log_probs": torch.zeros(number, LIMIT),
        "rm_scores": torch.zeros(number, LIMIT),
    }
    uid = np.array([str(i) for i in range(number)], dtype=object)
    batch = TensorDict(fields, batch_size=number)
    data = DataProto(batch=batch, non_tensor_batch={"uid": uid}, meta_info={})

    def call():
        sent = pickle.dumps(data, 5)
        pickle.loads(sent)
        return None, _sent(sent, WORKERS)

    return call


@CASES.add(ITEM, "verl (V1, its queue's fields)")
def _verl_nested() -> Call:
    from verl.protocol import deserialize_tensordict, serialize_tensordict
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    fields = []
    for length in response_lengths().tolist():
        prompts, responses = torch.ones(PROMPT).long(), torch.ones(length).long()
        whole = torch.cat((prompts, responses))
        fields.append(
            {
                "prompts": prompts,
                "responses": responses,
                "response_mask": torch.ones(length).long(),
                "loss_mask": torch.ones(length).long(),
                "input_ids": whole,
                "position_ids": torch.arange(len(whole)),
                "rollout_log_probs": torch.zeros(length),
                "rm_scores": torch.zeros(length),
            }
        )

    def packed(values):
        """memoryviews and arrays as bytes, which pickle takes."""
        if len(values) != 3:
            return values[0], [packed(each) for each in values[1]]
        kind, shape, data = values
        return kind, tuple(shape), bytes(data)

    def call():
        size, device, items = serialize_tensordict(list_of_dict_to_tensordict(fields))
        items = {key: packed(value) for key, value in items.items()}
        sent = pickle.dumps((size, device, items), 5)
        deserialize_tensordict(pickle.loads(sent))
        return None, _sent(sent)

    return call
