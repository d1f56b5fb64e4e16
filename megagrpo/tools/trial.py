"""`megagrpo try`: rollouts of the model as it is, by one engine and without a trainer, printed to
be read."""

import argparse
import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import httpx

from megagrpo.cluster.lock import alone_in
from megagrpo.cluster.machine import ENDING, start_service
from megagrpo.cluster.supervise import Launch
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.images import ImageStore
from megagrpo.data.prompts import load_prompts, load_tokenizer
from megagrpo.data.texts import decoder
from megagrpo.models.folder import Model
from megagrpo.monitor.rollout_log import Decode, turns_of
from megagrpo.rollout.agents.make import make_answering
from megagrpo.rollout.batches import BatchPlan, SampledBatch, SamplingJob
from megagrpo.rollout.control import (
    ServiceControl,
    ServiceFailed,
    ServiceUnreachable,
    bearer,
    find_service,
)
from megagrpo.rollout.generation import GenerationFailed, SamplingParams
from megagrpo.rollout.sampler import Sampler
from megagrpo.rollout.source import open_graders
from megagrpo.system.arguments import positive
from megagrpo.system.errors import translated
from megagrpo.system.processes import last_lines
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.one_engine import with_one_engine
from megagrpo.tools.view.texts import printable
from megagrpo.types import Outcome, RolloutGroup

_POLL_S = 0.5


def try_out(config: ExperimentConfig, num_prompts: int) -> int:
    """Samples a rollout of each of the first prompts and prints them; returns the exit status.

    Raises ValueError for what a run would refuse of model, data, graders and environment, and
    without an engine.
    """
    if not Path(config.model.path).exists():
        raise ValueError(
            f"model.path {config.model.path} does not exist; run `megagrpo "
            "sft` first, or name a model"
        )
    folder = RunFolder(config.run_folder.path / "try")
    config = with_one_engine(config, folder, own_weights=True)
    config = config.model_copy(
        update={"actor": config.actor.model_copy(update={"routing_replay": None})}
    )
    model = Model.of(config)
    tokenizer = load_tokenizer(model)
    images = ImageStore.of(model, folder.images)
    prompts = load_prompts(config.data, tokenizer, images, num_prompts).prompts[:num_prompts]
    decode = decoder(tokenizer, model, config.sampling)
    with alone_in(folder), Launch(folder, "try", end=ENDING) as launch, ExitStack() as stack:
        answering = stack.enter_context(closing(make_answering(config, tokenizer)))
        grader = stack.enter_context(open_graders(config, tokenizer))
        control = _service(launch, config)
        sampler = Sampler(config, 1, control, grader, decode, answering)
        sampler.images = images
        job = SamplingJob("try", 0, 0, SamplingParams.of(config.sampling), num_samples=1)
        batch = SampledBatch(job, BatchPlan(job, prompts).numbered())
        stack.callback(_show, batch, decode)  # also those that came before a failure
        missing = "rollouts are missing"
        with translated(missing, GenerationFailed, ServiceUnreachable, ServiceFailed):
            asyncio.run(_sample(sampler, batch, control, config.rollout.step_timeout_s))
        launch.status = 0
    return launch.status


async def _sample(
    sampler: Sampler, batch: SampledBatch, control: ServiceControl, limit_s: float
) -> None:
    work = asyncio.create_task(sampler.sample_share(batch))
    until = time.monotonic() + limit_s
    while not (await asyncio.wait([work], timeout=_POLL_S))[0]:
        (engine,) = await asyncio.to_thread(control.engines)
        if not engine.serves:  # nothing publishes to another one
            raise GenerationFailed(f"the engine ended: {engine.reason}")
        if time.monotonic() > until:
            raise GenerationFailed(sampler.missing(batch))
    await work


def _show(batch: SampledBatch, decode: Decode) -> None:
    for line in (line for group in batch.groups() for line in _lines(group, decode)):
        print(*map(printable, line.split("\n")), sep="\n")


def _service(launch: Launch, config: ExperimentConfig) -> ServiceControl:
    """Starts the service; returns it once its engine samples with the weights that it has read, as
    version 0."""
    service = start_service(launch, config, {})
    print(f"{config.name}: an engine starts, which takes minutes; {service.log}", flush=True)
    limit_s = config.rollout.start_timeout_s
    failed = None
    deadline = time.monotonic() + limit_s
    while service.process.poll() is None and time.monotonic() < deadline and not failed:
        with suppress(ServiceUnreachable):  # it has not started
            control = find_service(config.run_folder.path)
            status = control.status()
            failed = status.failed
            for engine in status.engines_of(""):
                if engine.alive:
                    httpx.post(
                        f"{engine.url}/update_weight_version",
                        json={"new_version": "0", "abort_all_requests": False},
                        headers=bearer(control.api_key),
                        trust_env=False,
                    )
                    control.report("ready", {engine.id: engine.incarnation})
                    return control
        time.sleep(_POLL_S)
    reason = failed or f"it took longer than {limit_s:g} s (rollout.start_timeout_s), or ended"
    raise ValueError(
        f"no engine started: {reason}\n{last_lines(service.log)}\nwhole log: {service.log}"
    )


def _lines(group: RolloutGroup, decode: Decode) -> Iterator[str]:
    """Yields a rollout as lines: what was said by turns, of which only the model's are trained on,
    and its outcome."""
    (outcome,) = group.outcomes
    rewards = iter(outcome.turn_rewards)
    yield f"\n== prompt {group.prompt.id}, answer {group.prompt.answer!r}"
    for number, sample in enumerate(group.samples):
        context = group.prompt.text if sample.prompt_ids is None else decode(sample.prompt_ids)
        if len(group.samples) > 1:
            yield f"-- sample {number} of {len(group.samples)}"
        yield from _spoken("prompt", context)
        for turn in turns_of(sample, rewards, decode):
            yield from _spoken(turn["by"], turn["text"])
            if turn.get("reward"):
                yield f"{'':>13}   reward {turn['reward']:g}"
    own = sum(
        len(s.token_ids) if s.loss_mask is None else int(s.loss_mask.sum()) for s in group.samples
    )
    yield f"{_verdict(outcome)}; {own} tokens of {len(group.samples)} sample(s) would be trained on"


def _spoken(who: str, text: str) -> Iterator[str]:
    for index, line in enumerate(text.splitlines() or [""]):
        yield f"{who if index == 0 else '':>13} {'>' if who == 'model' else '|'} {line}"


def _verdict(outcome: Outcome) -> str:
    parts = ", ".join(f"{name} {part.value:g}" for name, part in outcome.parts.items() if part.ok)
    text = f"reward {outcome.value:g}" if outcome.ok else f"no reward, {outcome.status}"
    text += f" ({parts})" if parts else ""
    text += f", ended by {outcome.end}" if outcome.end else ""
    return f"{text}: {outcome.detail}" if outcome.detail else text


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    command.add_argument(
        "--prompts",
        type=positive,
        default=3,
        help="number of prompts, from the start of the data (default 3)",
    )


def run(args: argparse.Namespace, config: ExperimentConfig) -> int:
    """Runs the command."""
    return try_out(config, args.prompts)
