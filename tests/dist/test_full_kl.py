"""The exact KL to the reference in the actor: values and gradients against dense logits and finite differences.

Layouts: `megagrpo certify CONFIG --set algorithm.kl.estimator=full`.
"""

from tests.dist.workers.host import DEVICE  # comes first: it prepares the host for Megatron

# isort: split

from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.actor.step import backward, denominators_of, hidden_states, update, with_old_logprobs, with_reference
from megagrpo.algo.statistics import row_counts
from megagrpo.batching.batch import build_batch
from megagrpo.batching.updates import one_pass
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.schema import ActorConfig, OptimizerConfig
from megagrpo.tools.certify.measure import joined
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample
from megagrpo.weights.actor_weights import load_initial_weights
from tests.dist.bounds import close

FULL = AlgorithmConfig.model_validate({"kl": {"loss_coef": 1.0, "estimator": "full"}})
TEMPERATURE = 0.7


@pytest.fixture
def actor(tmp_path):
    """A tiny model whose weights have moved away from the reference."""
    small = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "num_experts": 4,
        "expert_ffn_size": 16,
    }
    make_tiny_model(TinyModelConfig(path=str(tmp_path / "model"), **small), 0)
    options = ActorConfig(logprob_chunk_tokens=7, micro_batch_tokens=24)
    optimizer = OptimizerConfig(lr=1e-2, distributed=False)
    model = str(tmp_path / "model")
    with joined(tmp_path / "store", config=options, optimizer=optimizer, model_path=model, device=DEVICE) as actor:
        load_initial_weights(actor, str(tmp_path / "model"))
        actor.keep_reference()
        move(actor, direction(actor, 1), 0.05)
        yield actor


def direction(actor, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator) * p.detach().abs().mean()
        for name, p in actor.parameters().items()
    }


def move(actor, by: dict, amount: float) -> None:
    with torch.no_grad():
        for name, parameter in actor.parameters().items():
            parameter += amount * by[name]


def batch_of(actor):
    """Six responses, the second of each group with a hole; advantages 0, so that the loss is the KL."""
    generator = torch.Generator().manual_seed(3)
    groups = []
    for g in range(3):
        responses = [tuple(torch.randint(3, 20, (n,), generator=generator).tolist()) for n in (2 + g, 9)]
        masks = [None, (1, 1, 1, 0, 0, 0, 1, 1, 1)]
        samples = [Sample(i, ids, (-1.0,) * len(ids), "stop", 0, "", masks[i]) for i, ids in enumerate(responses)]
        groups.append(RolloutGroup(g, Prompt(g, "", (1, 5, 6), ""), tuple(samples), (Outcome("score"),) * 2))
    batch = build_batch(groups, one_pass(3, num_updates=3), actor.mesh)
    return type(batch)(**{**vars(batch), "advantages": torch.zeros(len(batch.tokens))})


def exact_loss(actor, batch) -> float:
    rows = range(len(batch.lengths))
    return backward(actor, batch, rows, FULL, TEMPERATURE, denominators_of(actor, batch, rows, FULL, 9))["loss/total"]


def referred(actor, batch):
    return with_reference(actor, batch, "full", TEMPERATURE)


class Results(TorchDispatchMode):
    """Collects the operators that return a tensor of one shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.operators = shape, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == self.shape:
            self.operators.add(function.overloadpacket)
        return result


def test_hidden_states_of_all_positions_are_in_memory_once(actor):
    """plan counts them once: parts that are joined would be there twice."""
    batch = batch_of(actor)
    with Results((int(batch.loss_mask.sum()), actor.arch.hidden_size)) as results:
        states = hidden_states(actor, batch)
    assert results.operators <= {torch.ops.aten.empty, torch.ops.aten.slice}
    assert states.hidden.dtype == states.output_weight.dtype


def test_value_and_gradient_of_the_output_weight(actor):
    batch = referred(actor, with_old_logprobs(actor, batch_of(actor), TEMPERATURE, squares=True))
    assert batch.ref_logprobs is None and batch.old_logprobs is not None
    live, reference = hidden_states(actor, batch), batch.reference
    weight = live.output_weight.clone().requires_grad_()
    places = batch.loss_mask
    ours, theirs = live.hidden[live.index[places]], reference.hidden[reference.index[places]]
    assert int(places.sum()) == len(ours) == len(live.hidden) == 2 + 3 + 4 + 3 * 6
    assert not torch.allclose(ours, theirs, atol=1e-2)
    vocabulary = actor.arch.vocab_size
    p = (ours @ weight.T / TEMPERATURE)[:, :vocabulary].log_softmax(1)
    q = (theirs @ reference.output_weight.T / TEMPERATURE)[:, :vocabulary].log_softmax(1)
    assert close("squares", batch.squares[places], p.detach().exp().square().sum(1), rtol=1e-5, atol=1e-7)
    assert not batch.squares[~places].any()
    expected = (p.exp() * (p - q)).sum(1).mean()
    expected.backward()
    assert float(expected.detach()) > 1e-3
    assert exact_loss(actor, batch) == pytest.approx(float(expected.detach()), rel=1e-4)
    gradient = actor.gradients()["0.output_layer.weight"]
    assert close("gradient", gradient, weight.grad, rtol=1e-3, atol=1e-6)


def test_gradient_of_all_weights(actor):
    """Along a direction, against finite differences: the gradient passes through the whole model."""
    batch = referred(actor, batch_of(actor))
    exact_loss(actor, batch)
    with actor.as_reference():
        initial = {name: p.detach().clone() for name, p in actor.parameters().items()}
    away = {
        name: (p.detach() - initial[name]).sign() * p.detach().abs().mean() for name, p in actor.parameters().items()
    }
    slope = sum(float((actor.gradients()[name] * away[name]).sum()) for name in away)
    eps = 3e-3
    move(actor, away, eps)
    above = exact_loss(actor, batch)
    move(actor, away, -2 * eps)
    below = exact_loss(actor, batch)
    assert slope == pytest.approx((above - below) / (2 * eps), rel=0.02)


def test_updates_pull_the_model_back_to_the_reference(actor):
    """Several updates of a step use the same reference states, row subsets and all."""
    found = []
    for _ in range(8):
        batch = referred(actor, with_old_logprobs(actor, batch_of(actor), TEMPERATURE))
        found.append(update(actor, batch, FULL, TEMPERATURE, 9).metrics["policy/kl_reference"])
    assert found[-1] < 0.7 * found[0]


def test_a_step_reads_the_masks_of_all_tokens_once(actor):
    """Not once an update: a step may have hundreds of updates, and a batch 100,000 samples."""
    batch = referred(actor, with_old_logprobs(actor, batch_of(actor), TEMPERATURE))
    assert batch.num_updates == 3
    with patch("megagrpo.algo.rollouts.row_counts", wraps=row_counts) as reads:
        metrics = update(actor, batch, FULL, TEMPERATURE, 9).metrics
    assert reads.call_count == 1 and metrics["optim/skipped_updates"] == 0
