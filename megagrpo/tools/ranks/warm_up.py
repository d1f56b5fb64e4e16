"""Supervised warm-up: trains `answer` + end of sequence after `prompt`, and writes a Hugging Face
folder."""

import numpy as np
import torch

from megagrpo.actor.head import Loss, TokenValues, over_tokens, with_draft
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.schedule import run_schedule, sum_over_ranks
from megagrpo.actor.step import DIVIDED
from megagrpo.batching.batch import build_batch
from megagrpo.batching.updates import one_pass
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.images import ImageStore
from megagrpo.data.prompts import (
    describe_dropped,
    load_prompts,
    load_tokenizer,
    whole_response,
)
from megagrpo.monitor.console import StepConsole
from megagrpo.monitor.step_log import StepLog
from megagrpo.system.progress import Progress
from megagrpo.tools.ranks.start import model_to_warm_up
from megagrpo.types import Batch, MicroBatch, Outcome, Prompt, RolloutGroup, Sample
from megagrpo.weights.actor_weights import load_initial_weights
from megagrpo.weights.hf_export import export_hf

_DECAY = 0.95  # of the loss's running mean: about 20 steps


def warm_up(config: ExperimentConfig, device: torch.device, progress: Progress) -> None:
    """Collective. Trains from `sft.model` for `sft.num_steps` steps and writes the result to
    `model.path`."""
    options = config.sft
    data = config.sft_data
    assert options and data, "the command refuses a configuration without an sft section"
    # adapters are for the model that this writes
    settings = {"lora": None, "optimizer": options.optimizer.like(config.actor.optimizer)}
    model = model_to_warm_up(config)
    progress.enter(f"{config.actor.world_size} ranks meet and load the model")
    actor = MegatronActor(
        arch=model.arch,
        config=config.actor.model_copy(update=settings),
        num_updates=options.num_steps,
        seed=config.seed,
        device=device,
    )
    mesh = actor.mesh
    weights = load_initial_weights(actor, options.model)
    tokenizer = load_tokenizer(model)
    images = ImageStore.of(model, config.run_folder.images)
    prompts = load_prompts(data, tokenizer, images)
    actor.images = images.pixels if images else None
    for prompt in prompts.prompts:  # refuses what no token is for, before any step
        whole_response(tokenizer, prompt.location, prompt.text, prompt.answer)
    log = StepLog(config.run_folder.sft, config.log) if mesh.is_main else None
    running = 0.0  # mean of the loss
    console = StepConsole(f"{config.name} sft", options.num_steps, enabled=mesh.is_main)
    progress.follow(console.note, console.bar)
    progress.enter("")
    if dropped := describe_dropped(data, prompts):
        console.note(dropped)
    for number in range(1, options.num_steps + 1):
        chosen = prompts.batch((number - 1) * options.batch_size, options.batch_size, config.seed)
        values = likelihood_step(actor, _supervised_batch(chosen, tokenizer, mesh))
        loss = values["loss/total"]  # all-reduced: every rank stops at the same step
        running = loss if number == 1 else _DECAY * running + (1 - _DECAY) * loss
        low_enough = options.stop_at_loss is not None and running < options.stop_at_loss
        done = number == options.num_steps or low_enough
        if log is not None:
            log.write(number, values | {"loss/running": running})
            if number % 10 == 0 or done:
                console.update(number, {"loss/total": running})
        if done:
            break
    if log is not None:
        log.close()
    export_hf(config.model.path, weights, mesh, config, options.model)


def likelihood_step(actor: MegatronActor, batch: Batch) -> dict[str, float]:
    """Collective. Makes one supervised update: minus the mean log-probability over the loss mask is
    the loss."""
    num_tokens = actor.mesh.reduce(batch.loss_mask.sum(), "sum")

    def token_loss(micro: MicroBatch, values: TokenValues) -> Loss:
        loss = -values.logprobs.sum() / num_tokens.to(values.logprobs.dtype)
        return loss, {"loss/total": loss.detach()}

    actor.zero_grad()
    actor.clock.clear()
    every = range(len(batch.lengths))
    on_last_stage = with_draft(actor, over_tokens(actor, batch, 1.0, token_loss), 1.0, num_tokens)
    sums = sum_over_ranks(
        actor, run_schedule(actor, batch, every, on_last_stage, forward_only=False)
    )
    wanted = {name: value for name, value in sums.items() if name.startswith(DIVIDED)}
    return {**wanted, **actor.optimizer_step(sums["loss/total"]), **actor.clock.take()}


def _supervised_batch(prompts: list[Prompt], tokenizer, mesh) -> Batch:
    """Returns a batch of this rank's share of the prompts with their answers as responses."""
    groups = []
    for index in range(mesh.dp_rank, len(prompts), mesh.dp_size):
        prompt = prompts[index]
        answer = whole_response(tokenizer, prompt.location, prompt.text, prompt.answer)
        sample = Sample(0, answer, np.zeros(len(answer)), "stop", 0, prompt.answer)
        groups.append(RolloutGroup(index, prompt, (sample,), (Outcome("score"),)))
    return build_batch(groups, one_pass(len(prompts)), mesh)
