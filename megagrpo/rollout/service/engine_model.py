"""The model folder that engines load: the model's own, or a description in the engines' format if
that differs.

A quantization_config makes SGLang build FP8 layers, whose parameters only a publish of FP8 weights
fills. On a CPU SGLang has no sparse attention.
"""

import json
from pathlib import Path

from megagrpo.config.schema import ExperimentConfig, ModelConfig
from megagrpo.families.model import write_description
from megagrpo.families.models.sparse_attention import dense_config
from megagrpo.families.quantization import fp8_block, load_format_problems
from megagrpo.families.table import read_description
from megagrpo.system.run_folder import RunFolder


def as_engines_see_it(
    config: ExperimentConfig, folder: RunFolder, cuda: bool = True
) -> ExperimentConfig:
    """Returns the experiment with model.path set to the folder for engines, which is written if
    formats differ.

    All nodes must see the run folder. Raises ValueError if engines would read quantised weights
    themselves. Without CUDA a model with sparse attention is a dense one, the same up to index_topk
    tokens (check/problems.py refuses longer samples), which ignores indexers in a publish.
    """
    model = Path(config.model.path)
    description = model / "config.json"
    hf = read_description(description) if description.is_file() else {}
    quantised = config.rollout.quantization is not None
    dense = not cuda and "index_topk" in hf
    if fp8_block(hf) is None and not quantised and not dense:
        return config
    problems = load_format_problems(hf, config.rollout.load_format)
    if problems:
        raise ValueError("; ".join(problems))
    if dense and config.rollout.load_format == "model":
        raise ValueError(
            "rollout.load_format = model, but without a GPU engines start from another description "
            "of a model with sparse attention, without its files; use dummy, the first publish "
            "fills them"
        )
    write_description(model, folder.engine_model, fp8=quantised, draft=config.actor.has_draft)
    if dense:
        written = folder.engine_model / "config.json"
        written.write_text(json.dumps(dense_config(read_description(written)), indent=2) + "\n")
    tokenizer = config.model.tokenizer or config.model.path
    seen = ModelConfig(path=str(folder.engine_model), tokenizer=tokenizer)
    return config.model_copy(update={"model": seen})
