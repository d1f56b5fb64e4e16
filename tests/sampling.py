"""Sampling against a service, fake or real: a grader, an experiment, a source of groups, and the steps of a loop."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager

import torch

from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.curriculum import Curriculum
from megagrpo.data.prompts import PromptSet
from megagrpo.mesh import Mesh, make_mesh
from megagrpo.models.folder import Model
from megagrpo.monitor.metrics import Metrics
from megagrpo.rewards.part_rewards import ResponseTokens
from megagrpo.rollout.agents.answering import Answering
from megagrpo.rollout.agents.make import make_answering
from megagrpo.rollout.batches import Batches, BatchPlan, SamplingJob, StepBatches
from megagrpo.rollout.control import ServiceControl
from megagrpo.rollout.generation import SamplingParams
from megagrpo.rollout.sampler import Sampler
from megagrpo.rollout.source import RolloutSource
from megagrpo.types import Outcome, Prompt, RolloutGroup, TrainState
from tests import experiments
from tests.fake_service import FakeService, running

MESH = make_mesh(0, 1, torch.device("cpu"), 60.0)


class Grader:
    """Scores a text at once, after a call of `on_submit`; after its group, the negative of that."""

    def __init__(
        self,
        score: Callable[[str], float] = lambda text: float(text or 0),
        on_submit: Callable[[], object] = lambda: None,
    ):
        self.texts, self._score, self.on_submit = [], score, on_submit

    def submit(self, prompt: Prompt, text: str, tokens: ResponseTokens) -> Future:
        self.texts.append(text)
        self.on_submit()
        return _done(Outcome("score", float(self._score(text))))

    def submit_group(self, prompt: Prompt, texts: Sequence[str], outcomes: Sequence[Outcome]) -> Future:
        return _done([Outcome("score", -outcome.value) for outcome in outcomes])


def _done(value) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def experiment(**sections) -> ExperimentConfig:
    """Two prompts of two responses a step, short time limits; each section is added to these."""
    base = {"train": {"group_size": 2, "num_prompts_per_step": 2, "num_steps": 6}}
    base |= {"rollout": {"request_timeout_s": 20.0, "step_timeout_s": 30.0}}
    return experiments.experiment(**base | {name: base.get(name, {}) | section for name, section in sections.items()})


def prompt_set(number: int = 20) -> PromptSet:
    return PromptSet(tuple(Prompt(i, "", (1, 100 + i), "") for i in range(number)), 0, False)


def digits(token_ids) -> str:
    """What the fake service's responses are worth."""
    return "".join(map(str, token_ids))


def source_of(
    control: ServiceControl,
    config: ExperimentConfig,
    grader: object = None,
    decode: Callable = digits,
    *,
    mesh: Mesh = MESH,
    answering: Answering | None = None,
) -> RolloutSource:
    """The source of a rank as a run has it."""
    sampler = None
    if mesh.is_leader:
        sampler = Sampler(config, mesh.dp_size, control, grader or Grader(), decode, answering)
        if config.actor.routing_replay == "rollout":
            sampler.arch = Model.of(config).arch
    return RolloutSource(control, sampler, Batches(config, mesh, prompt_set()))


def plan(
    source: RolloutSource, step: int, prompts: Sequence[Prompt], version: int, first_id: int = 0, ahead: bool = False
) -> BatchPlan:
    """A training batch of these prompts."""
    job = SamplingJob.training(source.batches.config, step, version, ahead=ahead)
    return BatchPlan(job, prompts, first_id)


def finished(
    source: RolloutSource, planned: BatchPlan, publish: Callable[[int, list[str]], object] | None = None
) -> list[RolloutGroup]:
    """This rank's groups of a batch. publish: to engines that came back; else they are called ready."""
    version = planned.job.version
    publish = publish or (lambda version, ids: source._control.report("ready", {ids[0]: 1}, version))
    batch = source.begin(planned)
    while outdated := source.wait([batch], version):
        publish(version, outdated)
    return source.take(batch)


def sampled(
    source: RolloutSource, step: int, prompts: Sequence[Prompt], version: int, publish=None
) -> list[RolloutGroup]:
    """This rank's groups of a training batch."""
    return finished(source, plan(source, step, prompts, version), publish)


def evaluated(
    source: RolloutSource, prompts: Sequence[Prompt], version: int, params: SamplingParams, num_samples: int
) -> list[RolloutGroup]:
    """This rank's groups of an evaluation."""
    job = SamplingJob("evaluate", 0, version, params, num_samples)
    return finished(source, BatchPlan(job, prompts))


@contextmanager
def playing(config: ExperimentConfig, tokenizer, service: FakeService) -> Iterator[RolloutSource]:
    """The source of a rank whose samples are played by the experiment's environment or agent."""
    decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)  # noqa: E731
    with (
        closing(make_answering(config, tokenizer)) as answering,
        running(service),
        closing(source_of(service.control, config, Grader(), decode, answering=answering)) as source,
    ):
        yield source


def take(
    source: RolloutSource,
    state: TrainState,
    steps_left: int = 6,
    of: PromptSet | None = None,
    metrics: Metrics | None = None,
) -> StepBatches:
    """A step, with the state after it. of: the prompts, if they are others."""
    batches = source.batches
    prompts = batches.prompts = of or batches.prompts
    batches.curriculum = Curriculum.of(batches.config, prompts.prompts, prompts.mixture)
    step = source.begin_step(state, steps_left)
    while wanted := step.wanted():
        step.add(finished(source, wanted))
    source.end_step(step, metrics or Metrics())
    step.finish()
    return step
