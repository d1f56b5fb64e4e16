"""The certificate: report.json with every figure, report.md as a table."""

import json
import math
from pathlib import Path
from typing import TypedDict

from megagrpo import __version__
from megagrpo.families.table import FAMILIES

LOSS_BOUND = 1e-6
NORM_BOUND = 1e-5
GRADIENT_BOUND = 1e-5
WEIGHT_BOUND = 1e-6


class CaseFigures(TypedDict):
    """One case's figures; errors are differences from the one-rank reference, `gradients` by HF
    name."""

    loss: float
    loss_error: float
    grad_norm: float
    norm_error: float
    gradients: dict[str, float]
    weights: float


class CaseResult(CaseFigures):
    """Figures with their case: cases.Case as a mapping, and its variant."""

    case: dict[str, object]
    variant: str


def failures(result: CaseFigures, rounding: int = 1) -> list[str]:
    """Returns a message with the figure for each error above its bound, which is `rounding` times
    the usual one. NaN is above every bound."""
    messages = []
    if not result["loss_error"] <= LOSS_BOUND * rounding:
        messages.append(f"loss off by {result['loss_error']:.2g}")
    if not result["norm_error"] <= NORM_BOUND * rounding:
        messages.append(f"gradient norm off by {result['norm_error']:.2g} of it")
    name, worst = worst_gradient(result)
    if not worst <= GRADIENT_BOUND * rounding:
        wrong = sum(
            not value <= GRADIENT_BOUND * rounding for value in result["gradients"].values()
        )
        messages.append(f"gradient of {wrong} parameters, worst {name}: {worst:.2g} of its largest")
    if not result["weights"] <= WEIGHT_BOUND * rounding:
        messages.append(f"updated weights off by {result['weights']:.2g}")
    return messages


def worst_gradient(result: CaseFigures) -> tuple[str, float]:
    """Returns the parameter with the largest max|g - g1| / max|g1| and that ratio; ("", 0) without
    gradients."""
    return max(
        result["gradients"].items(),
        key=lambda item: math.inf if math.isnan(item[1]) else item[1],
        default=("", 0.0),
    )


def write_certificate(
    folder: Path, *, name: str, family: str, results: list[CaseResult], left_out: dict[str, str]
) -> tuple[str, bool]:
    """Writes both files; returns the text of report.md and whether every case is within the
    bounds."""
    rounding = FAMILIES[family].ROUNDING
    passed = all(not failures(result, rounding) for result in results)
    lines = [
        f"# Certificate of {name} ({family}): {'passed' if passed else 'FAILED'}",
        "",
        "Same batch, same weights, float32, against one rank (padded, one micro-batch). "
        f"Bounds{f', times {rounding}' if rounding > 1 else ''}: loss {LOSS_BOUND:g}, per parameter",
        f"max|g - g1| / max|g1| {GRADIENT_BOUND:g}, gradient norm {NORM_BOUND:g} of it, "
        f"weights after the updates {WEIGHT_BOUND:g}",
        "of the largest.",
        "",
        "| layout | variant | loss | loss error | gradient norm | worst gradient | weights | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        case = result["case"]
        wrong = failures(result, rounding)
        gradient = f"{worst_gradient(result)[1]:.1e}" if result["gradients"] else "(sharded)"
        lines.append(
            f"| {case['layout']} | {result['variant']} | {result['loss']:.7f} | "
            f"{result['loss_error']:.1e} "
            f"| {result['grad_norm']:.6f} | {gradient} | {result['weights']:.1e} | "
            f"{'; '.join(wrong) or 'ok'} |"
        )
    lines += ["", *(f"Not run: {layout}: {reason}." for layout, reason in left_out.items())]
    text = "\n".join(lines) + "\n"
    bounds = {
        "loss": LOSS_BOUND,
        "norm": NORM_BOUND,
        "gradient": GRADIENT_BOUND,
        "weights": WEIGHT_BOUND,
    }
    bounds = {what: bound * rounding for what, bound in bounds.items()}
    cases = [{**result, "failures": failures(result, rounding)} for result in results]
    report = {
        "experiment": name,
        "family": family,
        "version": __version__,
        "passed": passed,
        "bounds": bounds,
    }
    report |= {"cases": cases, "not_run": left_out}
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    (folder / "report.md").write_text(text)
    return text, passed
