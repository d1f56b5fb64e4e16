"""One place each: a toy estimator, loss and reward step, written into a copy of the package as a user of a clone would.

Each takes a variant with its name in the union, and a function with its row: two files, nothing else.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.experiments import ROOT, python

# kind -> file -> (text that stands there, what is inserted before it)
VARIANTS = {
    "estimator": ("config/objective/estimators.py", "AdvantageConfig = Annotated[", """
class ToyAdvantage(Estimator):
    formula = "weight r"
    name: Literal["toy"] = "toy"
    weight: float = 1.0


""", "    GrpoAdvantage\n", "    ToyAdvantage |\n"),
    "loss": ("config/objective/policy_loss.py", "PolicyLossConfig = Annotated[", """
class ToyLoss(Variant):
    formula = "weight rho A"
    name: Literal["toy"] = "toy"
    weight: float = 1.0


""", "    PpoClipLoss\n    | GspoLoss", "    ToyLoss |\n"),
    "reward step": ("config/objective/reward_shaping.py", "class RewardShapingConfig(", """
class RewardBonus(RewardStep):
    bonus: float | None = None


""", "RewardClip, RewardNormalization", "RewardBonus, "),
}  # fmt: skip
FUNCTIONS = {
    "estimator": ("algo/estimators.py", "ESTIMATORS: dict", """
from megagrpo.config.objective.estimators import ToyAdvantage


def toy(inputs: EstimatorInputs, options: ToyAdvantage) -> Tensor:
    return options.weight * inputs.totals


""", "    GrpoAdvantage: grpo,", "    ToyAdvantage: toy,\n"),
    "loss": ("algo/policy_loss.py", "POLICY_LOSSES: dict", """
from megagrpo.config.objective.policy_loss import ToyLoss


def toy(inputs: PolicyInputs, options: ToyLoss) -> TokenLoss:
    return TokenLoss(options.weight * inputs.ratio * inputs.advantages, {})


""", "    PpoClipLoss: ppo_clip,", "    ToyLoss: toy,\n"),
    "reward step": ("algo/reward_shaping.py", "# In the order of operations.", """
from megagrpo.config.objective.reward_shaping import RewardBonus


def add_bonus(rewards: ShapedRewards, inputs: RewardInputs, options: RewardBonus) -> ShapedRewards:
    return rewards if options.bonus is None else replace(rewards, values=rewards.values + options.bonus)


""", "    RewardNormalization: normalize,", "    RewardBonus: add_bonus,\n"),
}  # fmt: skip
EXPERIMENT = """
name: toys
output_dir: out
model: {path: model}
data: {path: data.jsonl}
algorithm:
  advantage: {name: toy, weight: 3.0}
  loss: {name: toy, weight: 0.5}
  reward: {scale: 2.0, bonus: 10.0, clip: 13.0}
"""
# One step of two responses: the YAML file is read, the rewards 1 and 2 become advantages, and these a loss.
PROGRAM = """
import json, sys, torch
from megagrpo.algo.advantage import with_advantages
from megagrpo.algo.loss import LossInputs, count_denominators, objective
from megagrpo.algo.policy_loss import Rows
from megagrpo.algo.statistics import alone
from megagrpo.config.load import load_config
from megagrpo.types import AlgoState, Batch, Rewards

algorithm = load_config(sys.argv[1]).algorithm
ones, integers = torch.ones(2), torch.arange(2)
batch = Batch(
    sample_ids=integers, group_ids=torch.zeros_like(integers), num_groups=1, tokens=integers,
    lengths=torch.ones_like(integers), prompt_lengths=torch.zeros_like(integers), loss_mask=integers >= 0,
    rollout_logprobs=-ones,
    rewards=Rewards(torch.tensor([1.0, 2.0], dtype=torch.float64), integers >= 0), truncated=integers < 0,
)
batch, _, _ = with_advantages(batch, algorithm, alone, AlgoState(), max_response_tokens=1)
inputs = LossInputs(
    logprobs=-ones, entropy=ones, loss_mask=ones, advantages=batch.advantages, old_logprobs=-ones,
    rollout_logprobs=-ones, rows=Rows(torch.ones_like(integers)),
)
loss, _ = objective(inputs, algorithm, count_denominators(integers - integers + 1, alone, 1.0))
print(json.dumps([batch.advantages.tolist(), float(loss), algorithm.formula]))
"""


@pytest.fixture
def clone(tmp_path) -> Path:
    """The folder that holds a copy of the package."""
    shutil.copytree(ROOT / "megagrpo", tmp_path / "megagrpo", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def write(clone: Path, name: str, *insertions: str) -> None:
    """insertions: a text that stands in the file, what is inserted before it; and so on."""
    file = clone / "megagrpo" / name
    text = file.read_text()
    for before, inserted in zip(insertions[::2], insertions[1::2], strict=True):
        assert text.count(before) == 1, f"{name} has another shape: {before!r}"
        text = text.replace(before, inserted + before)
    file.write_text(text)


def in_clone(clone: Path, program: str, *arguments: str) -> list:
    return json.loads(python("-c", program, *arguments, cwd=clone, env=os.environ | {"PYTHONPATH": str(clone)}))


def test_a_variant_a_function_and_a_row_are_all_it_takes(clone):
    for kind in VARIANTS:  # two files
        write(clone, *VARIANTS[kind])
        write(clone, *FUNCTIONS[kind])
    (clone / "toys.yaml").write_text(EXPERIMENT)
    advantages, loss, formula = in_clone(clone, PROGRAM, "toys.yaml")
    # 3 (2 r + 10), of which 14 is clipped to 13: the bonus has its row before the clip
    assert advantages == [36.0, 39.0]
    assert loss == pytest.approx(0.5 * (36 + 39) / 2)
    assert "weight rho A" in formula and "A = weight r" in formula
