"""Checkpoints on file systems that fail."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from test_checkpoint import ANY, MESH, Plan, checkpointer, group, saved

from megagrpo.checkpoint.groups import saved_groups
from megagrpo.checkpoint.save import PendingSave, load
from megagrpo.config.schema import CheckpointConfig
from megagrpo.mesh import LeaderError
from megagrpo.types import TrainState


def test_a_file_system_that_is_gone_fails_on_every_rank_together(tmp_path: Path, monkeypatch):
    def gone(path: Path) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(shutil, "disk_usage", gone)
    with pytest.raises(LeaderError, match="rank 0 could not write: OSError: disk full"):
        PendingSave(
            tmp_path, TrainState(step=17), ANY, CheckpointConfig(), lambda part: Plan(part, fault="write"), MESH
        ).finish()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    folder = PendingSave(tmp_path, TrainState(step=17), ANY, CheckpointConfig(), Plan, MESH).finish()
    (folder / "bad").symlink_to("/proc/self/mem")  # its first page is of no process
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"bad": [0, 0]}))
    with pytest.raises(LeaderError, match=f"checkpoint file {folder}/bad cannot be read.*Input/output error"):
        load(folder, ANY, lambda part: None, MESH)


def test_no_group_is_read_with_the_state(tmp_path):
    """An export, a reference that moved and another run need none, and they may be gigabytes."""
    folder = PendingSave(tmp_path, TrainState(step=5, surplus=[group(4)]), ANY, CheckpointConfig(), Plan, MESH).finish()
    assert load(folder, ANY, lambda part: None, MESH).surplus == []
    assert saved_groups(folder, "surplus", MESH) == [group(4)]
    assert saved_groups(folder, "surplus", replace(MESH, rank=1)) == [], "of a rank that does not sample"


def test_a_save_that_failed_is_not_tried_again_by_the_error_that_it_raised(tmp_path: Path):
    planned = []

    def plan(folder: Path, reshardable: bool) -> Plan:
        planned.append(folder)
        return Plan(folder, fault="write")

    saver = checkpointer(tmp_path, plan, every=2)
    with pytest.raises(LeaderError, match="disk full"):
        saver.on_schedule(TrainState(step=2))
    saver.save_now(TrainState(step=2))
    assert len(planned) == 1 and saved(tmp_path) == []
