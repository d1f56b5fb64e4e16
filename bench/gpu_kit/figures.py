"""What a section is given, and how it says what it found: figure by figure on disk, so that a crash
loses none."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


class Unavailable(Exception):
    """Says why a section, or a part of one, cannot be measured on this machine: no failure."""


@dataclass(frozen=True)
class Setting:
    """Where a section runs. `folder`: scratch of a run; sections may leave files there for later
    ones."""

    device: str  # "cuda" | "cpu"
    small: bool  # sizes for a CPU, to see that everything runs
    folder: Path

    def torch_device(self) -> torch.device:
        """Returns the device that a trainer would compute on here, and makes it this process's."""
        from megagrpo.actor.host import prepare_host

        device = prepare_host()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    def of(self, whole: T, small: T) -> T:
        """Returns what holds at the whole size or at the small one."""
        return small if self.small else whole


@dataclass(frozen=True)
class Figure:
    """One line of the table. value: None where there is none, and `note` says why."""

    what: str
    value: float | str | None
    unit: str = ""
    note: str = ""
    at_most: float | None = None  # what tests/gpu asserts

    @property
    def within(self) -> bool:
        """Whether the value is a number no larger than its bound; without a bound everything is."""
        if self.at_most is None:
            return True
        return (
            isinstance(self.value, float | int)
            and math.isfinite(self.value)
            and self.value <= self.at_most
        )


class Figures:
    """Takes down the figures of one section."""

    def __init__(self, file: Path):
        self._file = file

    def add(
        self,
        what: str,
        value: float | str | None,
        unit: str = "",
        note: str = "",
        at_most: float | None = None,
    ) -> None:
        """Writes one figure to disk, at once."""
        figure = Figure(what, value, unit, note, at_most)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(figure)) + "\n")
        print(f"{what}: {value} {unit} {note}", flush=True)


def read_figures(file: Path) -> list[Figure]:
    """Returns what a section has written so far; a line cut by its death does not count."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            found.append(Figure(**json.loads(line)))
        except json.JSONDecodeError:
            break
    return found
