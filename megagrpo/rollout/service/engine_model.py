"""The model folder that engines load: the model's own, or a description in the engines' format if
that differs.

A quantization_config makes SGLang build FP8 layers, whose parameters only a publish of FP8 weights
fills.
"""

from pathlib import Path

from megagrpo.config.schema import ExperimentConfig, ModelConfig
from megagrpo.families.model import write_description
from megagrpo.families.quantization import quantization_problems
from megagrpo.families.table import load_format_problems, read_description, stored_otherwise
from megagrpo.system.run_folder import RunFolder


def as_engines_see_it(config: ExperimentConfig, folder: RunFolder) -> ExperimentConfig:
    """Returns the experiment with model.path set to the folder for engines, which is written if
    formats differ.

    All nodes must see the run folder. Raises ValueError if engines would read quantised weights
    themselves.
    """
    model = Path(config.model.path)
    description = model / "config.json"
    hf = read_description(description) if description.is_file() else {}
    quantised = config.rollout.quantization is not None
    if stored_otherwise(hf) is None and not quantised:
        return config
    problems = quantization_problems(hf) + load_format_problems(hf, config.rollout.load_format)
    if problems:
        raise ValueError("; ".join(problems))
    write_description(model, folder.engine_model, fp8=quantised, draft=config.actor.has_draft)
    tokenizer = config.model.tokenizer or config.model.path
    seen = ModelConfig(path=str(folder.engine_model), tokenizer=tokenizer)
    return config.model_copy(update={"model": seen})
