"""One machine's launcher: GPUs shared out between trainers and engines, one run a folder, signals."""

import signal

import pytest

from megagrpo.config import ExperimentConfig
from megagrpo.launcher import Ended, Signals, _devices, alone_in


def experiment(transport: str) -> ExperimentConfig:
    sections = {"actor": {"world_size": 2}, "rollout": {"num_engines": 2, "tp": 2}, "weights": {"transport": transport}}
    return ExperimentConfig.model_validate({"name": "t", "output_dir": "t", "model": {"path": "m"}, "data": {"path": "d"}} | sections)


def test_each_has_its_own():
    trainers, engines = _devices(experiment("broadcast"), ["7", "6", "5", "4", "3", "2"])
    assert trainers == {"CUDA_VISIBLE_DEVICES": "7,6"} and engines == {"CUDA_VISIBLE_DEVICES": "5,4,3,2"}
    assert _devices(experiment("broadcast"), []) == ({}, {}), "a machine without GPUs"


def test_too_few():
    with pytest.raises(ValueError, match=r"5 GPU\(s\) are visible, but 2 trainer ranks .* and 4 engine ranks"):
        _devices(experiment("broadcast"), list("01234"))
    assert _devices(experiment("disk"), list("01234")) == ({}, {}), "shared"


def test_only_one_run_trains_into_a_folder(tmp_path):
    with alone_in(tmp_path / "run"):
        with pytest.raises(ValueError, match="output_dir .*run: another run trains into this folder"), alone_in(tmp_path / "run"):
            pass
        with alone_in(tmp_path / "other"):
            pass
    with alone_in(tmp_path / "run"):
        pass


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_with_the_status_that_shells_know(number, status):
    with pytest.raises(Ended) as caught, Signals((number,)):
        signal.raise_signal(number)
    assert caught.value.status == status
