"""What `megagrpo init` writes is run as it is."""

import pytest
from run_megagrpo import succeed

from megagrpo.checkpoint.folder import latest, step_of
from megagrpo.monitor.step_log import read_metrics
from megagrpo.system.run_folder import RunFolder


@pytest.mark.slow
def test_an_experiment_of_init_runs(experiments):
    experiment = experiments / "mine.yaml"
    data = experiments / "data" / "train.jsonl"
    said = succeed("init", experiments / "model", data, "--gpus", "0", "-o", experiment).stdout
    assert "no problems found" in said and "every answer is, or ends in, a number" in said
    succeed("run", experiment, "--set", "train.num_steps=2", "--set", "eval.every=2")
    folder = RunFolder(experiments / "runs" / "mine")
    steps = [entry for entry in read_metrics(folder) if "reward/mean" in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert any("eval/accuracy" in entry for entry in read_metrics(folder))
    assert step_of(latest(folder.checkpoints)) == 2
