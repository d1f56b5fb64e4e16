"""20 supervised updates and 5 steps of GRPO of a tiny model, whose samples transformers draws: does
it learn?"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.gpu_kit.figures import Figures, Setting
from bench.gpu_kit.models import DEVICE, PLAIN, QWEN3_TINY, description, random_actor, random_batch
from bench.gpu_kit.precision import weights_of
from bench.gpu_kit.timing import wait_for
from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.algo.advantage import with_advantages
from megagrpo.batching.batch import build_batch
from megagrpo.batching.updates import one_pass
from megagrpo.cpu.torchvision_ops import define_torchvision_operators
from megagrpo.tools.certify.measure import whole
from megagrpo.tools.ranks.warm_up import likelihood_step
from megagrpo.types import AlgoState, Outcome, Prompt, RolloutGroup, Sample

VOCAB, PROMPT, RESPONSE = 64, 4, 12
_SUPERVISED, _STEPS, _GROUPS, _GROUP_SIZE = 20, 5, 8, 8
LOGPROB_BOUND = 0.1  # between transformers in float32 and the actor in bfloat16, on the mean, nats


def updates(figures: Figures, setting: Setting) -> None:
    """Teaches it to count, then, by reward, to prefer small tokens. What it samples from is what it
    was updated to."""
    sizes = QWEN3_TINY | {"vocab_size": VOCAB}
    with random_actor(
        setting.folder / "updates",
        description("qwen3", sizes),
        lr=3e-3,
        dtype="bfloat16",
        micro_batch_tokens=512,
    ) as actor:
        losses = _supervised(actor)
        figures.add("loss of the first supervised update", losses[0], "nats")
        note = "the text is predictable: it falls"
        figures.add(
            f"loss after {len(losses)} updates", losses[-1], "nats", note, at_most=0.8 * losses[0]
        )
        rewards, gaps = _reinforced(actor, sizes)
        figures.add("mean reward of the first GRPO step", rewards[0])
        figures.add(f"mean reward of step {len(rewards)}", rewards[-1])
        figures.add(
            "reward lost from first to last",
            rewards[0] - rewards[-1],
            "",
            "negative: it learns",
            at_most=0.0,
        )
        note = "transformers in float32 against the actor"
        figures.add(
            "largest mean log-prob difference of a step", max(gaps), "nats", note, LOGPROB_BOUND
        )
    wait_for(DEVICE)


def _supervised(actor: MegatronActor) -> list[float]:
    batch = random_batch(VOCAB, [32] * 16, 1)
    first = batch.tokens[batch.starts][:, None]
    counted = (3 + (first + torch.arange(32)) % (VOCAB - 3)).flatten()
    batch = replace(batch, tokens=counted.int())
    return [likelihood_step(actor, batch)["loss/total"] for _ in range(_SUPERVISED)]


def _reinforced(actor: MegatronActor, sizes: dict) -> tuple[list[float], list[float]]:
    """Returns mean rewards and mean absolute differences of log-probabilities, of each step."""
    sampler, weights, state = _Sampler(sizes), weights_of(actor), AlgoState()
    rewards, gaps = [], []
    for number in range(_STEPS):
        sampler.take(whole(weights, actor.parameters(), actor.mesh))
        groups = sampler.groups(seed=number)
        batch = build_batch(groups, one_pass(_GROUPS), actor.mesh)
        batch = step.with_old_logprobs(actor, batch, 1.0)
        assert batch.old_logprobs is not None, "it was asked for"
        gap = (batch.old_logprobs - batch.rollout_logprobs).abs()[batch.loss_mask]
        gaps.append(float(gap.mean()))
        rewards.append(float(batch.rewards.values.mean()))
        batch, state, _ = with_advantages(batch, PLAIN, actor.mesh.reduce, state, RESPONSE)
        step.update(actor, batch, PLAIN, 1.0, RESPONSE)
    return rewards, gaps


class _Sampler:
    """Samples from a model of transformers in float32, token by token."""

    def __init__(self, sizes: dict):
        define_torchvision_operators()
        from transformers import AutoConfig, AutoModelForCausalLM

        hf = description("qwen3", sizes)
        config = AutoConfig.for_model(
            **{key: value for key, value in hf.items() if key != "architectures"}
        )
        self._model: Any = AutoModelForCausalLM.from_config(config).to(DEVICE).float().eval()

    def take(self, weights: dict[str, Tensor]) -> None:
        """Copies the actor's weights, HF names; a tied output layer is the embedding."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])

    @torch.no_grad()
    def groups(self, seed: int) -> list[RolloutGroup]:
        """Samples every group's responses; the reward is the share of tokens from the lower half of
        the vocabulary."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        prompts = torch.randint(3, VOCAB, (_GROUPS, PROMPT), generator=generator, device=DEVICE)
        tokens, found = prompts.repeat_interleave(_GROUP_SIZE, 0), []
        for _ in range(RESPONSE):
            logprobs = self._model(input_ids=tokens).logits[:, -1].float().log_softmax(-1)
            chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)
            found.append(logprobs.gather(1, chosen))
            tokens = torch.cat((tokens, chosen), 1)
        responses, chances = tokens[:, PROMPT:].tolist(), torch.cat(found, 1).tolist()
        groups = []
        for number, prompt in enumerate(prompts.tolist()):
            mine = range(number * _GROUP_SIZE, (number + 1) * _GROUP_SIZE)
            samples = [
                Sample(k, tuple(responses[i]), tuple(chances[i]), "stop", 0, "")
                for k, i in enumerate(mine)
            ]
            outcomes = [
                Outcome("score", sum(t < VOCAB // 2 for t in responses[i]) / RESPONSE) for i in mine
            ]
            groups.append(
                RolloutGroup(
                    number, Prompt(number, "", tuple(prompt), ""), tuple(samples), tuple(outcomes)
                )
            )
        return groups
