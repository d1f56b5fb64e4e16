"""Sampling against a service, fake or real: a grader, an experiment, a source of groups, and the
steps of a loop."""

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
from megagrpo.rewards.parts import ResponseTokens
from megagrpo.rollout.agents.answering import Answering
from megagrpo.rollout.agents.make import make_answering
from megagrpo.rollout.control import ServiceControl
from megagrpo.rollout.sampler import Sampler
from megagrpo.rollout.selection import GroupChoice, StepGroups
from megagrpo.rollout.source import RolloutSource
from megagrpo.types import Outcome, Prompt, TrainState
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

    def submit_group(
        self, prompt: Prompt, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> Future:
        return _done([Outcome("score", -outcome.value) for outcome in outcomes])


def _done(value) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def experiment(**sections) -> ExperimentConfig:
    """Two prompts of two responses a step, short time limits; each section is added to these."""
    base = {"train": {"group_size": 2, "num_prompts_per_step": 2, "num_steps": 6}}
    base |= {"rollout": {"request_timeout_s": 20.0, "step_timeout_s": 20.0}}
    return experiments.experiment(
        **base | {name: base.get(name, {}) | section for name, section in sections.items()}
    )


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
    publish: Callable[[int, list[str]], object] | None = None,
) -> RolloutSource:
    """The source of a rank as run.py builds it. publish: to engines that came back; else they are
    called ready."""
    sampler = None
    if mesh.is_leader:
        sampler = Sampler(config, mesh.dp_size, control, grader or Grader(), decode, answering)
        if config.actor.routing_replay == "rollout":
            sampler.arch = Model.of(config).arch
    update = publish or (lambda version, ids: control.mark_ready(ids[0], 1, version))
    return RolloutSource(config, mesh, control, sampler, update)


@contextmanager
def playing(config: ExperimentConfig, tokenizer, service: FakeService) -> Iterator[RolloutSource]:
    """The source of a rank whose samples are played by the experiment's environment or agent."""
    decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)  # noqa: E731
    with (
        closing(make_answering(config, tokenizer)) as answering,
        running(service),
        closing(
            source_of(service.control, config, Grader(), decode, answering=answering)
        ) as source,
    ):
        yield source


def take(
    source,
    config: ExperimentConfig,
    state: TrainState,
    steps_left: int = 6,
    of: PromptSet | None = None,
    metrics=None,
    mesh: Mesh = MESH,
) -> StepGroups:
    """The groups of a step, with the state after it."""
    prompts = of or prompt_set()
    choice = GroupChoice(
        source, prompts, config, mesh, Curriculum.of(config, prompts.prompts, prompts.mixture)
    )
    taken = choice.next_groups(state, metrics or Metrics(), steps_left)
    state.data_cursor, state.surplus = taken.data_cursor, taken.surplus
    state.curriculum = taken.curriculum
    source.drop_consumed()
    state.step += 1
    return taken
