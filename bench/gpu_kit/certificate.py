"""The certificate's cases of one rank: padding, packing, micro-batches and recomputing change
nothing here."""

import json
import math

from bench.gpu_kit.figures import Figures, Setting
from bench.gpu_kit.models import DEVICE
from megagrpo.config.schema import ExperimentConfig, ParallelConfig
from megagrpo.families.family import TinySizes
from megagrpo.tools.certify.cases import LAYOUTS, grid
from megagrpo.tools.certify.measure import measure
from megagrpo.tools.certify.report import (
    GRADIENT_BOUND,
    LOSS_BOUND,
    NORM_BOUND,
    WEIGHT_BOUND,
    worst_gradient,
)
from megagrpo.tools.certify.subject import make_models
from megagrpo.tools.certify.tiny_model import hf_config

_SMALL = ("padded, 4096 tokens", "packed, 48 tokens, recompute full")


def certificate(figures: Figures, setting: Setting) -> None:
    """Takes the worst of every figure over the cases, against the first one. Float32, with the
    certificate's bounds."""
    folder = setting.folder / "certificate"
    config = ExperimentConfig.model_validate(
        {
            "name": "kit",
            "output_dir": str(folder),
            "model": {"path": str(folder / "real")},
            "data": {"path": "none.jsonl"},
            "algorithm": {"kl": {"loss_coef": 0.1}, "entropy_coef": 0.01},
        }
    )
    (folder / "real").mkdir(parents=True, exist_ok=True)
    (folder / "real" / "config.json").write_text(json.dumps(hf_config(TinySizes())))
    make_models(folder, config, ParallelConfig(), config.seed)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(folder / "model")})}
    )
    cases, _ = grid(LAYOUTS, ranks=1, is_moe=True, only=["1 rank"])
    cases = [case for case in cases if not setting.small or case.variant in _SMALL]
    results = [
        measure(config, case, folder=folder, store=folder / f"store{number}", device=DEVICE)
        for number, case in enumerate(cases)
    ]
    figures.add("cases", len(results), "", "; ".join(case.variant for case in cases))
    for name, bound in (
        ("loss_error", LOSS_BOUND),
        ("norm_error", NORM_BOUND),
        ("weights", WEIGHT_BOUND),
    ):
        figures.add(
            name.replace("_", " "), _worst([result[name] for result in results]), at_most=bound
        )
    worst = _worst([worst_gradient(result)[1] for result in results])
    figures.add("gradient of a parameter", worst, "", "max|g - g1| / max|g1|", GRADIENT_BOUND)


def _worst(values: list[float]) -> float:
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)
