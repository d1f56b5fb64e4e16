"""The certificate's cases of one rank: padding, packing, micro-batches and recomputing change
nothing here; and of two, where there are two GPUs."""

import json
import math
from pathlib import Path

import torch

from bench.gpu_kit.figures import Figures, Setting, Unavailable
from bench.gpu_kit.models import DEVICE
from megagrpo.config.schema import ExperimentConfig, ParallelConfig
from megagrpo.tools.certify.cases import LAYOUTS, NEIGHBOR, grid
from megagrpo.tools.certify.certificate import bounds_of, errors_of
from megagrpo.tools.certify.command import certify
from megagrpo.tools.certify.measure import measure
from megagrpo.tools.certify.synthetic import make_models
from megagrpo.tools.certify.tiny_model import TinySizes, hf_config

# NCCL refuses two ranks on one GPU. Norms of experts under TP2xEP2: Megatron-LM issue 5916.
_TWO_RANKS = ("DP2", "TP2+SP", "EP2", "TP2xEP2", "PP2")
_SMALL = ("padded, 4096 tokens", "packed, 48 tokens, recompute full")


def certificate(figures: Figures, setting: Setting) -> None:
    """Takes the worst of every figure over the cases, against the first one. Float32, with the
    certificate's bounds."""
    folder = setting.folder / "certificate"
    config = ExperimentConfig.model_validate(_experiment(folder))
    make_models(folder, config, ParallelConfig(), config.seed)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(folder / "model")})}
    )
    cases, _ = grid(LAYOUTS, 1, lambda actor: [], ["1 rank"])
    small = [case for case in cases if case.variant in _SMALL or case == NEIGHBOR]
    cases = setting.of(cases, small)
    results = [
        measure(config, case, folder=folder, store=folder / f"store{number}", device=DEVICE)
        for number, case in enumerate(cases)
    ]
    bounds = bounds_of(results.pop(cases.index(NEIGHBOR)))
    cases.remove(NEIGHBOR)
    figures.add("cases", len(results), "", "; ".join(case.variant for case in cases))
    _add_worst(figures, results, bounds)


def two_ranks(figures: Figures, setting: Setting) -> None:
    """Runs `megagrpo certify` on two devices: layouts of two ranks against one."""
    if setting.device == "cuda" and torch.cuda.device_count() < 2:
        raise Unavailable("one GPU: NCCL refuses two ranks on it")
    folder = setting.folder / "two_ranks"
    folder.mkdir()
    config = ExperimentConfig.model_validate(
        _experiment(folder) | {"actor": {"device": setting.device}}
    )
    layouts = setting.of(_TWO_RANKS, ("TP2xEP2",))
    certify(config, 2, layouts)
    report = json.loads((config.run_folder.certify / "report.json").read_text())
    results = [case for case in report["cases"] if case["case"]["layout"] in layouts]
    figures.add("cases", len(results), "", ", ".join(layouts))
    _add_worst(figures, results, report["bounds"])


def _experiment(folder: Path) -> dict:
    """Returns an experiment, after the config.json of its model is made in `folder`."""
    (folder / "real").mkdir(parents=True, exist_ok=True)
    (folder / "real" / "config.json").write_text(json.dumps(hf_config(TinySizes())))
    return {
        "name": "kit",
        "output_dir": str(folder),
        "model": {"path": str(folder / "real")},
        "data": {"path": "none.jsonl"},
        "algorithm": {"kl": {"loss_coef": 0.1}, "entropy_coef": 0.01},
    }


def _add_worst(figures: Figures, results: list, bounds: dict[str, float]) -> None:
    """Adds the worst of every figure over the cases."""
    shown = {
        "loss": ("loss error", ""),
        "norm": ("norm error", ""),
        "gradient": ("gradient of a parameter", "max|g - g1| / max|g1|"),
        "weights": ("weights", ""),
    }
    errors = [errors_of(result) for result in results]
    for what, (name, note) in shown.items():
        worst = _worst([of_case[what] for of_case in errors])
        figures.add(name, worst, "", note, bounds[what])


def _worst(values: list[float]) -> float:
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)
