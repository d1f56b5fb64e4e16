"""The model folder that engines load: the model's own, or a bfloat16 description if that is quantised.

With its quantization_config SGLang would build FP8 layers, whose parameters no publish of bfloat16 weights fills.
"""

from pathlib import Path

from megagrpo.config.schema import ExperimentConfig, ModelConfig
from megagrpo.families.quantization import fp8_block, load_format_problems
from megagrpo.families.table import read_description
from megagrpo.system.run_folder import RunFolder
from megagrpo.weights.hf_folder import write_description


def as_engines_see_it(config: ExperimentConfig, folder: RunFolder) -> ExperimentConfig:
    """Returns the experiment with model.path set to the folder for engines, which is written if the model is quantised.

    All nodes must see the run folder. Raises ValueError if engines would read quantised weights themselves.
    """
    model = Path(config.model.path)
    description = model / "config.json"
    hf = read_description(description) if description.is_file() else {}
    if fp8_block(hf) is None:
        return config
    problems = load_format_problems(hf, config.rollout.load_format)
    if problems:
        raise ValueError("; ".join(problems))
    write_description(model, folder.engine_model)
    tokenizer = config.model.tokenizer or config.model.path
    seen = ModelConfig(path=str(folder.engine_model), tokenizer=tokenizer)
    return config.model_copy(update={"model": seen})
