"""The inputs of a run that need no other process: model, tokenizer, prompts, and what answers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.curriculum import Curriculum
from megagrpo.data.images import ImageStore
from megagrpo.data.prompts import (
    PromptSet,
    load_prompts,
    load_tokenizer,
    refuse_long_demonstration,
    refuse_unknown_teacher,
)
from megagrpo.data.texts import decoder
from megagrpo.models.folder import Model
from megagrpo.monitor.metrics import Metrics
from megagrpo.monitor.rollouts import Decode
from megagrpo.rollout.agents.answering import Answering
from megagrpo.rollout.agents.make import make_answering

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Inputs:
    """The inputs that a run reads before it needs any other process."""

    model: Model
    tokenizer: "PreTrainedTokenizerBase"
    decode: Decode
    prompts: PromptSet
    eval_prompts: PromptSet | None
    answering: Answering
    images: ImageStore | None  # of a vision-language model
    curriculum: Curriculum | None

    @classmethod
    def load(cls, config: ExperimentConfig) -> "Inputs":
        """Loads the inputs of an experiment. Raises ValueError."""
        model = config.read_model()
        tokenizer = load_tokenizer(model)
        images = ImageStore.of(model, config.run_folder.images)
        prompts = load_prompts(config.data, tokenizer, images)
        refuse_unknown_teacher(prompts.prompts, config.teachers)
        refuse_long_demonstration(prompts.prompts, config.sampling.max_response_tokens)
        held_out = config.eval_data
        eval_prompts = load_prompts(held_out, tokenizer, images) if held_out else None
        decode = decoder(tokenizer, model, config.sampling.skip_special_tokens)
        return cls(
            model=model,
            tokenizer=tokenizer,
            decode=decode,
            prompts=prompts,
            eval_prompts=eval_prompts,
            answering=make_answering(config, tokenizer),
            images=images,
            curriculum=Curriculum.of(config, prompts.prompts, prompts.mixture),
        )

    def add_metrics(self, metrics: Metrics) -> None:
        """Adds what environments, agents and images measured since the last call."""
        self.answering.add_metrics(metrics)
        if self.images is not None:
            self.images.add_metrics(metrics)
