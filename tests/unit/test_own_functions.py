"""A loss, an estimator and a filter by import path: the same as the package's own, one message for
each mistake, and recorded."""

import hashlib
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megagrpo.algo.dynamic_sampling import select_groups
from megagrpo.algo.policy_loss import PolicyInputs, Rows, token_loss
from megagrpo.algo.statistics import alone
from megagrpo.check.problems import preflight
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.load import ConfigError, dump_config
from tests.experiments import experiment, read_experiment
from tests.unit.algo_inputs import batch_of, policy_inputs, with_advantages

OWN = Path(__file__).parents[1] / "own_algorithm.py"
LENGTHS = [0, 1, 31, 32, 33, 1024, 1025, 0, 40_000, 7]


def algorithm(**sections) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(sections)


def test_a_loss_is_called_with_its_arguments():
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = (torch.randn(3, 4, generator=generator) for _ in range(3))
    inputs = policy_inputs(logprobs, old, advantages, torch.ones(3, 4, dtype=torch.bool))
    own = algorithm(loss={"name": f"{OWN}:plain", "args": {"weight": 2.0}})
    wide = algorithm(loss={"name": "ppo_clip", "clip_ratio_low": 1.0, "clip_ratio_high": 1e6})
    made = token_loss(inputs, own.loss)
    assert torch.equal(made.value, 2 * token_loss(inputs, wide.loss).value)
    assert made.clipped == {}
    gmpo = token_loss(inputs, algorithm(loss={"name": f"{OWN}:gmpo"}).loss)
    assert gmpo.value.shape == (12,) and set(gmpo.clipped) == {"low", "high"}
    inputs = replace(inputs, advantages=advantages[:, :1].expand(3, 4).flatten())  # one for each sequence
    both = (algorithm(loss={"name": name}).loss for name in (f"{OWN}:gmpo", "gmpo"))
    torch.testing.assert_close(*(token_loss(inputs, loss).value for loss in both))
    with pytest.raises(ValueError, match=r"wrong_shape returned Tensor, shape \[\]; .*\[12\]"):
        token_loss(inputs, algorithm(loss={"name": f"{OWN}:wrong_shape"}).loss)


def test_a_sequences_sum_has_the_same_bits_beside_any_others():
    values = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(0))
    values *= torch.linspace(-20, 20, len(values)).exp()
    parts = values.split(LENGTHS)
    sums = Rows(torch.tensor(LENGTHS)).sums(values)
    assert sums.tolist() == pytest.approx([math.fsum(part.tolist()) for part in parts], rel=1e-14)
    for first, last in ((0, 3), (2, 6), (5, 10), (8, 9)):
        some = Rows(torch.tensor(LENGTHS[first:last])).sums(torch.cat(parts[first:last]))
        assert torch.equal(some, sums[first:last])
    alone_sums = [Rows(torch.tensor([len(part)])).sums(part) for part in parts]
    assert torch.equal(torch.cat(alone_sums), sums)
    assert Rows(torch.tensor([], dtype=torch.int64)).sums(values[:0]).shape == (0,)


def test_sums_and_means_of_sequences_have_gradients():
    """As a loss of one's own may need them: d (sum_i c_i mean_i) / dx = c_i / T_i on the mask."""
    x = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    rows, mask = Rows(torch.tensor([3, 2])), torch.tensor([True, False, True, True, True])
    mean = PolicyInputs(x, x, x, mask, rows, x).sequence_mean(x)
    (gradient,) = torch.autograd.grad((mean * torch.tensor([1.0, 0, 0, 5.0, 0])).sum(), x)
    assert gradient.tolist() == [0.5, 0.0, 0.5, 2.5, 2.5]


def test_an_estimator_sees_the_statistics_of_groups():
    rewards = torch.tensor([1.0, 0.0, 0.0, 3.0, 1.0, 2.0])
    own = algorithm(advantage={"name": f"{OWN}:mad", "args": {"eps": 1e-9}})
    batch = batch_of(rewards, [0, 0, 0, 1, 1, 1], torch.ones(6, 2))
    made = with_advantages(batch, own)[0].advantages
    # of 1, 0, 0 the deviations are 2/3, 1/3, 1/3, their mean 4/9
    expected = torch.tensor([1.5, -0.75, -0.75, 1.5, -1.5, 0.0])
    torch.testing.assert_close(made, expected[:, None].expand(6, 2))


def test_a_filter_chooses_the_groups():
    own = algorithm(dynamic_sampling={"filter": f"{OWN}:mixed", "args": {"most": 0.5}})
    metric = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    ids = torch.arange(8) // 2
    valid = torch.tensor([True] * 7 + [False])
    keeps = own.dynamic_sampling.load_filter()
    selection = select_groups(metric, ids, 4, valid, 1, alone, keeps)
    assert (selection.chosen, selection.surplus, selection.dropped) == ([1], [], [0, 2, 3])
    assert f"without groups that {OWN}:mixed drops" in own.formula
    # a group without a score has no largest one: the filter is not asked
    unscored = select_groups(metric, ids, 4, valid & (ids != 1), 4, alone, max)
    assert (unscored.chosen, unscored.dropped) == ([2, 3], [0, 1])


@pytest.mark.parametrize(
    "sections, said",
    [
        ({"loss": {"name": "no_such_module:f"}}, "algorithm.loss 'no_such_module:f': importing"),
        ({"loss": {"name": f"{OWN}:gmp"}}, "has no function gmp; did you mean 'gmpo'?"),
        ({"loss": {"name": f"{OWN}:gmpo", "args": {"clp": 1}}}, "did you mean 'clip'?"),
        ({"loss": {"name": f"{OWN}:plain"}}, "missing a required argument: 'weight'"),
        ({"advantage": {"name": f"{OWN}:NUMBER"}}, "algorithm.advantage"),
        ({"dynamic_sampling": {"filter": f"{OWN}:mixed"}}, "algorithm.dynamic_sampling.filter.args do not fit"),
    ],
)
def test_a_mistake_is_one_message(sections, said):
    found = [text for text in preflight(experiment(algorithm=sections)) if "algorithm." in text]
    assert len(found) == 1 and said in found[0], found


@pytest.mark.parametrize("module", ["{file}", "callables"])
@pytest.mark.parametrize("name", ["partly", "cached", "made", "wrapped", "plain"])
def test_the_record_has_the_digest_of_every_kind_of_callable(tmp_path, monkeypatch, module, name):
    file = tmp_path / "callables.py"
    file.write_text(
        "import contextlib, functools\n"
        "def plain(inputs, k=1): return inputs\n"
        "partly = functools.partial(plain, k=2)\n"
        "cached = functools.lru_cache(plain)\n"
        "wrapped = contextlib.contextmanager(plain)\n"  # a function of contextlib.py
        "class Made:\n    def __call__(self, inputs): return inputs\n"
        "made = Made()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "callables", raising=False)
    named = f"{module.format(file=file)}:{name}"
    dump_config(experiment(algorithm={"loss": {"name": named}}), tmp_path / "config.yaml")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert f"# algorithm.loss: {named}, sha256 {digest}" in (tmp_path / "config.yaml").read_text()


def test_a_file_and_an_override_name_them_and_the_run_folder_records_them(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "name: n\noutput_dir: o\nmodel: {path: m}\ndata: {path: d.jsonl}\n"
        f"algorithm: {{loss: {{name: '{OWN}:gmpo', args: {{clip: 0.3}}}}}}\n"
    )
    config = read_experiment(file, [f"algorithm.advantage.name={OWN}:mad"])
    assert config.algorithm.loss.args == {"clip": 0.3}
    assert f"[{OWN}:gmpo], A = {OWN}:mad" in config.algorithm.formula
    dump_config(config, tmp_path / "config.yaml")
    assert read_experiment(tmp_path / "config.yaml") == config
    digest = hashlib.sha256(OWN.read_bytes()).hexdigest()
    assert f"# algorithm.loss: {OWN}:gmpo, sha256 {digest}" in (tmp_path / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"own.yaml:5: algorithm.loss.args = 3"):
        file.write_text(file.read_text().replace("{clip: 0.3}", "3"))
        read_experiment(file)
    with pytest.raises(ConfigError, match=r"unknown; known: ppo_clip.* \(your own is written file"):
        file.write_text(file.read_text().replace(f"'{OWN}:gmpo', args: 3", "zzz"))
        read_experiment(file)
