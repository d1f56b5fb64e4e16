"""Which checkpoints make room for a new one."""

from pathlib import Path

import pytest
import torch

from megagrpo.checkpoint import latest, save
from megagrpo.mesh import make_mesh
from megagrpo.types import TrainState

MESH = make_mesh(0, 1, torch.device("cpu"), 60.0)


@pytest.mark.parametrize(
    ("there", "keep", "left"),
    [
        ([10, 12, 14], 2, [14, 17]),
        ([10], 5, [10, 17]),
        ([10, 12, 14, 16], 5, [10, 12, 14, 16, 17]),
        (["step_000020.partial", 10], 1, [17]),  # an interrupted save of a history that was left
        ([100, 120], 2, [17, 100, 120]),  # the new one never goes
    ],
)
def test_the_newest_stays(tmp_path: Path, there, keep, left):
    for name in there:
        (tmp_path / (name if isinstance(name, str) else f"step_{name:06d}")).mkdir()
    folder = save(tmp_path, TrainState(step=17), {}, keep, lambda folder: None, MESH)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:06d}" for step in left]
    assert (folder / "manifest.json").is_file() and latest(tmp_path, at_most=17) == folder
