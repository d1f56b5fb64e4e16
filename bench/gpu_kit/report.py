"""Writes what all sections found: one table for people, one JSON with everything."""

import math
import re
from dataclasses import asdict
from pathlib import Path

from bench.common import write_results
from bench.gpu_kit.children import Outcome
from bench.gpu_kit.figures import Figure

HEADER = ("section", "figure", "value", "bound", "note")


def write_report(folder: Path, outcomes: list[Outcome], origin: dict) -> Path:
    """Writes gpu_<device>.md and .json into `folder` and prints the table; returns the page."""
    device = str(value_of(outcomes, "surroundings", "device") or "unknown device")
    name = "gpu_" + re.sub(r"\W+", "_", device.lower()).strip("_")
    driver, torch = (
        value_of(outcomes, "surroundings", what) or "unknown" for what in ("driver", "torch")
    )
    machine = f"{device}, driver {driver}, torch {torch}, {origin['machine']}"
    data = {
        **origin,
        "machine": machine,
        "device": device,
        "sections": [asdict(outcome) for outcome in outcomes],
    }
    lines = [line for outcome in outcomes for line in _lines(outcome)]
    write_results(name, data, HEADER, lines, folder)
    return folder / f"{name}.md"


def value_of(outcomes: list[Outcome], section: str, what: str) -> float | str | None:
    """Returns one figure's value, None where there is none."""
    figures = [
        f
        for outcome in outcomes
        if outcome.section == section
        for f in outcome.figures
        if f.what == what
    ]
    return figures[0].value if figures else None


def above_bounds(outcomes: list[Outcome]) -> list[str]:
    """Returns the figures that are above their bound."""
    return [
        f"{outcome.section}: {figure.what} is {figure.value}, at most {figure.at_most:g}"
        for outcome in outcomes
        for figure in outcome.figures
        if not figure.within and figure.at_most is not None
    ]


def is_failure(outcome: Outcome) -> bool:
    """Tells a section that should have run to its end from one that this machine lacks something
    for."""
    return outcome.status in ("failed", "timed out")


def _lines(outcome: Outcome) -> list[tuple[str, ...]]:
    ended = "" if outcome.status == "not run" else f"{outcome.seconds:.0f} s"
    lines = [
        (
            outcome.section,
            "",
            f"**{outcome.status}**" if outcome.status != "done" else "done",
            "",
            ended,
        )
    ]
    if outcome.reason:
        lines[0] = (
            *lines[0][:-1],
            _cell(f"{ended}: {outcome.reason}" if ended else outcome.reason),
        )
    return lines + [
        ("", _cell(figure.what), *_value(figure), _cell(figure.note)) for figure in outcome.figures
    ]


def _value(figure: Figure) -> tuple[str, str]:
    value = figure.value
    if isinstance(value, float | int):
        shown = str(value) if not math.isfinite(value) or isinstance(value, int) else f"{value:.4g}"
    else:
        shown = _cell(value or "-")
    text = f"{shown} {figure.unit}".strip()
    bound = "" if figure.at_most is None else f"{figure.at_most:g}"
    return (text, bound) if figure.within else (f"**{text}**", bound)


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:240]
