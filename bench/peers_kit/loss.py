"""Loss and backward of one packed micro-batch (clip, dual clip, k3 KL), while another sample of the
step is as long as the limit."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from megagrpo.algo.loss import LossInputs, count_denominators, objective
from megagrpo.algo.policy_loss import Rows
from megagrpo.batching.microbatch import MicroBatchSize, plan_micro_batches
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.schema import ParallelConfig
from megagrpo.mesh import Mesh
from peers_kit.measure import OURS, Call, Case, Cases
from peers_kit.work import BUDGET, GROUP, LIMIT, nested, our_batch, own_rank, response_lengths

ROUNDS = 3  # of a call: a single one is short
KINDS = {"samples of a long tail": 0, "64 of 512 tokens": 512, "256 of 128 tokens": 128}
COEF = 0.001


def _lengths(size: int) -> np.ndarray:
    if size:
        return np.full(BUDGET // size, size, np.int64)
    drawn = response_lengths(4096)
    drawn = drawn[drawn < 12_000]
    return drawn[np.cumsum(drawn) < BUDGET]


def _values(total: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(3)
    old = -torch.rand(total, generator=chance)
    return {
        "old": old,
        "new": old + 0.2 * torch.randn(total, generator=chance),
        "ref": old + 0.1 * torch.randn(total, generator=chance),
        "advantages": torch.randn(total, generator=chance),
        "entropy": torch.rand(total, generator=chance),
    }


def _compared(loss: Tensor, leaf: Tensor) -> Callable[[], np.ndarray]:
    assert leaf.grad is not None
    grad = leaf.grad
    return lambda: np.array([loss.item(), grad.abs().sum().item()])


def _ours(size: int) -> Callable[[], Call]:
    def prepare() -> Call:
        lengths = _lengths(size)
        batch = our_batch(np.array([*lengths, LIMIT - 1]), prompt=1)
        values = _values(int(lengths.sum()))

        def flat(name: str) -> Tensor:
            out = torch.zeros(len(batch.tokens))
            out[batch.loss_mask.nonzero().flatten()[: len(values[name])]] = values[name]
            return out

        batch = replace(
            batch,
            old_logprobs=flat("old"),
            rollout_logprobs=flat("old"),
            ref_logprobs=flat("ref"),
            advantages=flat("advantages"),
        )
        mesh = Mesh(0, 1, 0, 1, None, None, 0, torch.device("cpu"))
        members = range(len(lengths))
        budget = MicroBatchSize(BUDGET + len(lengths), True)
        (micro,) = plan_micro_batches(batch, members, budget, ParallelConfig(), mesh)
        options = {"loss": {"name": "ppo_clip", "dual_clip": 3.0}, "kl": {"loss_coef": COEF}}
        algorithm = AlgorithmConfig.model_validate(options)
        counts = torch.from_numpy(lengths)
        denominators = count_denominators(counts, own_rank, 1.0)
        new, entropy = flat("new"), flat("entropy")

        def call():
            for _ in range(ROUNDS):
                leaf = micro.at_trained(new).requires_grad_()
                inputs = LossInputs(
                    logprobs=leaf,
                    entropy=micro.at_trained(entropy),
                    loss_mask=micro.at_trained(batch.loss_mask),
                    advantages=micro.at_trained(batch.advantages),
                    old_logprobs=micro.at_trained(batch.old_logprobs),
                    rollout_logprobs=micro.at_trained(batch.rollout_logprobs),
                    ref_logprobs=micro.at_trained(batch.ref_logprobs),
                    rows=Rows(micro.num_trained),
                    counted_tokens=counts,
                )
                loss, _ = objective(inputs, algorithm, denominators)
                loss.backward()
            return _compared(loss, leaf), {"values": len(leaf), "rounds": ROUNDS}

        return call

    return prepare


def _verl_data(lengths: np.ndarray, values: dict[str, Tensor]):
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    def rows(flat: Tensor) -> Tensor:
        return nested(list(flat.split(lengths.tolist())))

    number = len(lengths)
    ones = torch.ones(int(lengths.sum())).long()
    fields = {
        "prompts": nested([torch.ones(1).long()] * number),
        "responses": rows(ones),
        "response_mask": rows(ones),
        "old_log_probs": rows(values["old"]),
        "ref_log_prob": rows(values["ref"]),
        "advantages": rows(values["advantages"]),
    }
    data = TensorDict(fields, batch_size=number)
    sizes = {"dp_size": 1, "batch_num_tokens": len(ones), "global_batch_size": number}
    for key, value in sizes.items():
        tensordict_utils.assign_non_tensor_data(data, key, value)
    return data


def _verl(size: int) -> Callable[[], Call]:
    def prepare() -> Call:
        from verl.workers.config import ActorConfig
        from verl.workers.utils.losses import ppo_loss

        lengths = _lengths(size)
        values = _values(int(lengths.sum()))
        data = _verl_data(lengths, values)
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=GROUP,
            ppo_micro_batch_size_per_gpu=1,
            ppo_mini_batch_size=len(lengths),
            use_kl_loss=True,
            kl_loss_coef=COEF,
            kl_loss_type="k3",
            entropy_coeff=0.0,
        )
        # values of prompt and response, the last of which predicts nothing
        whole = torch.tensor(lengths) + 1
        starts = whole.cumsum(0) - whole
        places = torch.cat(
            [torch.arange(n - 1) + s for n, s in zip(whole.tolist(), starts.tolist(), strict=True)]
        )
        bounds = torch.cat((torch.zeros(1).long(), whole.cumsum(0)))

        def spread(flat: Tensor) -> Tensor:
            placed = flat.new_zeros(int(whole.sum())).index_copy(0, places, flat)
            return torch.nested.nested_tensor_from_jagged(placed, offsets=bounds)

        def call():
            for _ in range(ROUNDS):
                leaf = values["new"].clone().requires_grad_()
                output = {"log_probs": spread(leaf), "entropy": spread(values["entropy"])}
                loss, _ = ppo_loss(config, output, data)
                loss.backward()
            return _compared(loss, leaf), {"cells": len(lengths) * int(lengths.max())}

        return call

    return prepare


def _trl_trainer() -> SimpleNamespace:
    """The attributes of a GRPOTrainer that its loss reads."""
    accelerator = SimpleNamespace(
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, **_: x,
        num_processes=1,
        device=torch.device("cpu"),
    )
    args = SimpleNamespace(
        delta=3.0, use_bias_correction_kl=False, report_to=[], steps_per_generation=1
    )
    return SimpleNamespace(
        args=args,
        accelerator=accelerator,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        beta=COEF,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_liger_kernel=False,
        importance_sampling_level="token",
        loss_type="dapo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        temperature=1.0,
        model=SimpleNamespace(training=True),
        tools=None,
        mask_truncated_completions=False,
        max_completion_length=LIMIT,
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )


def _trl(size: int) -> Callable[[], Call]:
    def prepare() -> Call:
        from trl.trainer.grpo_trainer import GRPOTrainer

        lengths = _lengths(size)
        values = _values(int(lengths.sum()))
        number = len(lengths)
        mask = torch.arange(int(lengths.max()))[None] < torch.tensor(lengths)[:, None]

        def padded(flat: Tensor) -> Tensor:
            return torch.zeros(mask.shape).masked_scatter(mask, flat)

        leaves: list[Tensor] = []
        trainer = _trl_trainer()
        entropy = values["entropy"]
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
            padded(leaves[-1]),
            padded(entropy),
            None,
        )
        inputs = {
            "prompt_ids": torch.zeros(number, 1, dtype=torch.long),
            "prompt_mask": torch.ones(number, 1, dtype=torch.long),
            "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
            "completion_mask": mask.long(),
            # its own are of sequences; of tokens they are the same work
            "advantages": padded(values["advantages"]),
            "old_per_token_logps": padded(values["old"]),
            "ref_per_token_logps": padded(values["ref"]),
            "num_items_in_batch": torch.tensor(float(lengths.sum())),
        }

        def call():
            for _ in range(ROUNDS):
                leaves.append(values["new"].clone().requires_grad_())
                loss = GRPOTrainer._compute_loss(trainer, None, dict(inputs))
                loss.backward()
            return _compared(loss, leaves[-1]), {"cells": mask.numel()}

        return call

    return prepare


CASES = Cases()
for _kind, _size in KINDS.items():
    for _side, _prepared in ((OURS, _ours), ("verl", _verl), ("TRL", _trl)):
        CASES.append(Case(f"loss and backward, {_kind}", _side, _prepared(_size)))
