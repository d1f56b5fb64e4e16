"""The model folder that engines load: the model's own, or a description in the engines' format if
that differs.

A quantization_config makes SGLang build FP8 layers, whose parameters only a publish of FP8 weights
fills. A vision_config makes it build a tower, which no publish fills if trainers load the text part
only.
"""

import json
from pathlib import Path

from megagrpo.config.schema import ExperimentConfig, ModelConfig
from megagrpo.families.architecture import HfConfig
from megagrpo.families.model import write_description
from megagrpo.families.quantization import fp8_block, load_format_problems
from megagrpo.families.table import architecture_of, model_problems, read_description
from megagrpo.system.run_folder import RunFolder

# SGLang's key of config.json (configs/model_config.py). Its option --language-model-only is refused
# for most models that read the key.
_TEXT_ONLY = {"language_model_only": True}


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
    text_only = _loads_text_only(hf)
    if fp8_block(hf) is None and not quantised and not text_only:
        return config
    problems = load_format_problems(hf, config.rollout.load_format)
    if problems:
        raise ValueError("; ".join(problems))
    write_description(model, folder.engine_model, fp8=quantised, draft=config.actor.has_draft)
    if text_only:
        file = folder.engine_model / "config.json"
        file.write_text(json.dumps(read_description(file) | _TEXT_ONLY, indent=2) + "\n")
    if text_only and config.rollout.load_format == "model":
        for weights in model.glob("*.safetensors*"):
            (folder.engine_model / weights.name).unlink(missing_ok=True)
            (folder.engine_model / weights.name).symlink_to(weights.absolute())
    tokenizer = config.model.tokenizer or config.model.path
    seen = ModelConfig(path=str(folder.engine_model), tokenizer=tokenizer)
    return config.model_copy(update={"model": seen})


def _loads_text_only(hf: HfConfig) -> bool:
    """Returns whether a model has a vision tower that its family leaves out."""
    has_tower = "vision_config" in hf and not model_problems(hf)
    return has_tower and architecture_of(hf).vision is None
