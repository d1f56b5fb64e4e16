"""The certificate: report.json with every figure, report.md as a table."""

from pathlib import Path
from typing import TypedDict

from megagrpo import __version__
from megagrpo.system.run_folder import write_json_lines

# the bounds of `bounds_of`; the largest are that many times the least
LEAST = {"loss": 1e-6, "norm": 1e-5, "gradient": 1e-5, "weights": 1e-6}
LARGEST = 10
# Layouts differ by at most twice what NEIGHBOR does: bench/results/bounds.md.
FACTOR = 5


class CaseFigures(TypedDict):
    """One case's figures; errors are differences from the one-rank reference, `gradients` by HF
    name, infinite for NaN."""

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


def bounds_of(neighbor: CaseFigures) -> dict[str, float]:
    """Returns FACTOR times each error of cases.NEIGHBOR, at least LEAST, at most LARGEST times
    that."""
    moved = errors_of(neighbor)
    return {
        what: min(max(least, FACTOR * moved[what]), LARGEST * least)
        for what, least in LEAST.items()
    }


def failures(result: CaseFigures, bounds: dict[str, float]) -> list[str]:
    """Returns a message with the figure for each error above its bound. NaN is above every
    bound."""
    wrong = sum(not value <= bounds["gradient"] for value in result["gradients"].values())
    messages = {
        "loss": "loss off by {:.2g}",
        "norm": "gradient norm off by {:.2g} of it",
        "gradient": f"gradient of {wrong} parameters, worst {worst_gradient(result)[0]}: {{:.2g}} of "
        "its largest",
        "weights": "updated weights off by {:.2g}",
    }
    return [
        messages[what].format(error)
        for what, error in errors_of(result).items()
        if not error <= bounds[what]
    ]


def errors_of(result: CaseFigures) -> dict[str, float]:
    """Returns what bounds are for, by their names."""
    return {
        "loss": result["loss_error"],
        "norm": result["norm_error"],
        "gradient": worst_gradient(result)[1],
        "weights": result["weights"],
    }


def worst_gradient(result: CaseFigures) -> tuple[str, float]:
    """Returns the parameter with the largest max|g - g1| / max|g1| and that ratio; ("", 0) without
    gradients."""
    return max(result["gradients"].items(), key=lambda item: item[1], default=("", 0.0))


def write_certificate(
    folder: Path, *, name: str, family: str, results: list[CaseResult], left_out: dict[str, str]
) -> tuple[str, bool]:
    """Writes both files; returns the text of report.md and whether every case is within the
    bounds.

    results: as cases.grid orders them, the second one of cases.NEIGHBOR.
    """
    bounds = bounds_of(results[1])
    problems = [failures(result, bounds) for result in results]
    passed = not any(problems)
    lines = [
        f"# Certificate of {name} ({family}): {'passed' if passed else 'FAILED'}",
        "",
        "Same batch, same weights, float32, against one rank (padded, one micro-batch). "
        f"Bounds: loss {bounds['loss']:.2g}, per parameter",
        f"max|g - g1| / max|g1| {bounds['gradient']:.2g}, gradient norm {bounds['norm']:.2g} of it, "
        f"weights after the updates {bounds['weights']:.2g}",
        f"of the largest. They are {FACTOR} times the errors of the "
        "second row, where each weight is the next float32 above",
        f"or below; at least {', '.join(f'{least:g}' for least in LEAST.values())}, at most {LARGEST} "
        "times that.",
        "",
        "| layout | variant | loss | loss error | gradient norm | worst gradient | weights | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result, wrong in zip(results, problems, strict=True):
        case = result["case"]
        gradient = f"{worst_gradient(result)[1]:.1e}" if result["gradients"] else "(sharded)"
        lines.append(
            f"| {case['layout']} | {result['variant']} | {result['loss']:.7f} | "
            f"{result['loss_error']:.1e} "
            f"| {result['grad_norm']:.6f} | {gradient} | {result['weights']:.1e} | "
            f"{'; '.join(wrong) or 'ok'} |"
        )
    lines += ["", *(f"Not run: {layout}: {reason}." for layout, reason in left_out.items())]
    text = "\n".join(lines) + "\n"
    report = {
        "experiment": name,
        "family": family,
        "version": __version__,
        "passed": passed,
        "bounds": bounds,
        "cases": [
            {**result, "failures": wrong} for result, wrong in zip(results, problems, strict=True)
        ],
        "not_run": left_out,
    }
    write_json_lines(folder / "report.json", [report])  # an infinity is null
    (folder / "report.md").write_text(text)
    return text, passed
