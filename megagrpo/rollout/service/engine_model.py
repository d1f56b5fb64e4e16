"""The model folder that engines load: the model's own, or a description in the engines' format if
that differs.

A quantization_config makes SGLang build FP8 layers, whose parameters only a publish of FP8 weights
fills. A vision_config makes it build a tower, which no publish fills if trainers load the text part
only. On a CPU SGLang has no sparse attention.
"""

import json
from pathlib import Path

from megagrpo.config.schema import ExperimentConfig, ModelConfig
from megagrpo.models.config_json import HfConfig
from megagrpo.models.families.sparse_attention import dense_config
from megagrpo.models.folder import write_description
from megagrpo.models.table import (
    architecture_of,
    exported_config,
    model_problems,
    read_description,
    stored_otherwise,
)
from megagrpo.system.run_folder import RunFolder

# SGLang's key of config.json (configs/model_config.py). Its option --language-model-only is refused
# for most models that read the key.
_TEXT_ONLY = {"language_model_only": True}


def as_engines_see_it(
    config: ExperimentConfig, folder: RunFolder, cuda: bool = True
) -> ExperimentConfig:
    """Returns the experiment with model.path set to the folder for engines, which is written if
    formats differ.

    All nodes must see the run folder. Without CUDA a model with sparse attention is a dense one,
    the same up to index_topk tokens (check/rules/model.py refuses longer samples), which ignores
    indexers in a publish.
    """
    model = Path(config.model.path)
    hf = read_description(model / "config.json")
    quantised = config.rollout.quantization is not None
    text_only = _loads_text_only(exported_config(hf))
    dense = not cuda and "index_topk" in hf
    if stored_otherwise(hf) is None and not (quantised or text_only or dense):
        return config
    write_description(model, folder.engine_model, fp8=quantised, draft=config.actor.has_draft)
    written = folder.engine_model / "config.json"
    if text_only:
        written.write_text(json.dumps(read_description(written) | _TEXT_ONLY, indent=2) + "\n")
    if dense:
        written.write_text(json.dumps(dense_config(read_description(written)), indent=2) + "\n")
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
