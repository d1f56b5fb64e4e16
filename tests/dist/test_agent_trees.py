"""The turns of a scripted agent are trained on as the same tokens are that were made by hand: the same gradients.

Six turns with outputs of parallel tools, a fork and a compaction, through real programs and the real gateway; tokens,
log-probabilities and experts of the fake engine follow from each request's seed. Every layout gives the same bits for
both, and one rank's gradients but for rounding.
"""

import base64
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from aiohttp import web
from fake_service import FakeService
from sampling import experiment, playing, sampled

from examples.laptop.model import character_tokenizer
from megagrpo.checkpoint.groups import write_groups
from megagrpo.models.folder import Model
from megagrpo.rollout.generation import sample_seed
from megagrpo.types import Prompt, RolloutGroup
from tests.dist.bounds import within
from tests.dist.cases import LAYOUTS
from tests.dist.random_models import write_model
from tests.dist.workers.launch import run_ranks

TOKENIZER = character_tokenizer("0123456789HL?")
EOS = TOKENIZER.eos_token_id
STEP, GROUP_SIZE = 7, 3
GRADIENT_BOUND = 5e-5  # rounding: the advantages of a group cancel, and gradients are small beside their terms
TREE = [[0, "?"], [2, ["3", "4"]], [5, "H"], [5, "L"], [7, "5"], [0, "9"]]
LINE = [[0, "?"], [2, "H"], [4, "L"]]
SCRIPTS = [TREE, LINE, TREE]
# (turns of each sample, those of them that are trained on, what begins it)
SAMPLES = {
    6: [((0, 1, 2), (0, 1, 2), "?"), ((0, 1, 3, 4), (3, 4), "?"), ((5,), (5,), "9")],
    3: [((0, 1, 2), (0, 1, 2), "?")],
}
OF_CI = ("DP2", "TP2+SP", "PP2", "CP2", "EP2")


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


@dataclass
class Made:
    """What the engine samples with a seed."""

    tokens: list[int]
    logprobs: list[float]
    experts: np.ndarray  # [256, layers, k] int32, of the first tokens of a context

    @classmethod
    def of(cls, seed: int, model: Path) -> "Made":
        rng, arch = np.random.default_rng(seed), Model.read(str(model)).arch
        tokens = [*rng.choice(ids("0123456789HL"), rng.integers(1, 6)).tolist(), EOS]
        scores = rng.random((256, arch.num_layers, arch.experts.count))
        experts = np.argsort(scores, 2)[:, :, : arch.experts.per_token].astype(np.int32)
        return cls(tokens, (-rng.random(len(tokens)).astype(np.float32)).tolist(), experts)


class Engine(FakeService):
    """Answers as the seed says."""

    model = Path()

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        made = Made.of(body["sampling_params"]["sampling_seed"], self.model)
        read = len(body["input_ids"]) + len(made.tokens) - 1
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": str(self.version),
            "output_token_logprobs": [[lp, t, None] for lp, t in zip(made.logprobs, made.tokens, strict=True)],
            "routed_experts": base64.b64encode(made.experts[:read].astype("<i4").tobytes()).decode(),
        }
        return web.json_response({"meta_info": meta})


def recorded(model: Path) -> tuple[list[RolloutGroup], int]:
    """(the groups that the agents made, the seed of the run)"""
    agent = {"function": "tests.programs:scripted", "workers": 1}
    config = experiment(
        model={"path": str(model)},
        train={"group_size": GROUP_SIZE},
        actor={"routing_replay": "rollout"},
        rollout={"request_timeout_s": 200.0, "step_timeout_s": 200.0},
        sampling={"max_response_tokens": 100, "stop_token_ids": [EOS], "agent": agent},
    )
    prompts = [Prompt(n, "?", ids("?"), json.dumps(script)) for n, script in enumerate(SCRIPTS)]
    engine = Engine(version=3)
    engine.model = model
    with playing(config, TOKENIZER, engine) as source:
        return sampled(source, STEP, prompts, 3), config.seed


def by_hand(model: Path, run_seed: int) -> list[dict]:
    """Each sample with what an agent's turns were, the advantage of its rollout, and each token's first experts."""
    rows = []
    for prompt, script in enumerate(SCRIPTS):
        rewards, of_group = [], []
        for index in range(GROUP_SIZE):
            turns = []
            for number in range(len(script)):
                purpose = f"train turn {number}" if number else "train"
                turns.append(Made.of(sample_seed(run_seed, purpose, STEP, prompt, index), model))
            rewards.append(sum(len(turn.tokens) for turn in turns) % 7 / 6)
            said = ["".join(text) for _, text in script]
            for path, trained, begins in SAMPLES[len(script)]:
                row = {"prompt": len(ids(begins)), "tokens": ids(begins), "mask": [False], "logprobs": [0.0]}
                experts, known = [], 0
                for number in path:
                    before = ids(said[number]) if number != path[0] else []
                    row["tokens"] = row["tokens"] + before + turns[number].tokens
                    row["mask"] = row["mask"] + [False] * len(before) + [number in trained] * len(turns[number].tokens)
                    row["logprobs"] = row["logprobs"] + [0.0] * len(before) + turns[number].logprobs
                    experts.append(turns[number].experts[known : len(row["tokens"]) - 1])
                    known = len(row["tokens"]) - 1
                of_group.append((index, row | {"experts": np.concatenate(experts)}))
        values = np.array(rewards)
        advantages = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
        rows += [row | {"advantage": advantages[index], "place": n} for n, (index, row) in enumerate(of_group)]
        rows = [{"group": prompt} | row for row in rows]
    return rows


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, model_of) -> tuple[Path, dict]:
    """(folder; what all jobs have in common: the model, the groups and what was made by hand)"""
    folder = tmp_path_factory.mktemp("trees")
    model = model_of(write_model, "qwen3_moe")
    groups, seed = recorded(model)
    rows = by_hand(model, seed)
    write_groups(folder / "groups.npz", groups)
    torch.save(rows, folder / "rows.pt")
    found = [sample for group in groups for sample in group.samples]
    assert [len(group.samples) for group in groups] == [3 * GROUP_SIZE, GROUP_SIZE, 3 * GROUP_SIZE]
    for sample, row in zip(found, rows, strict=True):
        start = row["prompt"]
        assert sample.token_ids.tolist() == row["tokens"][start:], "the exact ids"
        mask = np.ones(len(sample.token_ids), bool) if sample.loss_mask is None else sample.loss_mask
        assert mask.tolist() == row["mask"][start:]
        trained = np.array(row["mask"][start:])
        assert np.array_equal(sample.logprobs[trained], np.float32(row["logprobs"][start:])[trained])
        assert np.array_equal(sample.routed_experts, row["experts"])
    assert sum(sum(row["mask"]) for row in rows) > 0
    base = {"model": str(model), "groups": str(folder / "groups.npz"), "rows": str(folder / "rows.pt")}
    return folder, base


@pytest.mark.parametrize("replay", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients_of_a_tree_are_those_of_samples_by_hand_in_every_layout(inputs, replay):
    folder, base = inputs
    base = base | {"routing_replay": "rollout" if replay else None, "reference": f"{folder}/one_{replay}.pt"}
    [alone] = run_ranks(1, folder / f"one_{replay}", [base | {"write": True}], script="agent_trees_ranks.py")
    assert alone["same"] == [] and alone["trained"] > 100
    jobs = [base | {"parallel": LAYOUTS[name], "packing": name != "TP2+SP"} for name in OF_CI]
    results = run_ranks(2, folder / f"two_{replay}", jobs, script="agent_trees_ranks.py")
    for name, result in zip(OF_CI, results, strict=True):
        assert result["same"] == [], name
        assert result["trained"] == alone["trained"], "as many as sampled"
        assert within("gradient", max(result["gradients"].values()), GRADIENT_BOUND), name
