"""Makes the object that answers the model's turns in an experiment."""

from functools import partial
from typing import TYPE_CHECKING

from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.texts import reasoning_end
from megagrpo.rollout.agents.answering import Answering, NoAnswer
from megagrpo.rollout.agents.environments import Environments, load_environment, refuse_machine
from megagrpo.rollout.agents.program_worker import load_program
from megagrpo.rollout.agents.renderer import Renderer
from megagrpo.rollout.service.addresses import own_address

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase


def make_answering(config: ExperimentConfig, tokenizer: "PreTrainedTokenizerBase") -> Answering:
    """Returns the object that answers turns of the model. Raises ValueError."""
    agent, environment = config.sampling.agent, config.sampling.environment
    make_renderer = partial(
        Renderer, tokenizer, config.data, reasoning_end=reasoning_end(config, tokenizer)
    )
    if agent is not None:
        # its HTTP server: not where a model is only checked
        from megagrpo.rollout.agents.programs import Programs

        if agent.function is not None:
            load_program(agent.function)
        renderer = make_renderer(continues=agent.history == "all")
        return Programs(agent, renderer, own_address(config.rollout.host), config.name)
    if environment is not None:
        load_environment(environment.function)
        refuse_machine(environment)
        renderer = make_renderer(continues=environment.history == "all")
        return Environments(environment, renderer)
    return NoAnswer()
