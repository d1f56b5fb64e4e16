"""One machine's launcher: GPUs shared out between trainers and engines, one run a folder, signals."""

import signal
import subprocess
import time

import pytest

from megagrpo.cluster.machine import _devices, alone_in
from megagrpo.cluster.supervise import Ended, Signals, first_report, ignore_signals, watch
from megagrpo.config.schema import ExperimentConfig


def experiment(transport: str) -> ExperimentConfig:
    sections = {"actor": {"world_size": 2}, "rollout": {"num_engines": 2, "tp": 2}, "weights": {"transport": transport}}
    return ExperimentConfig.model_validate(
        {"name": "t", "output_dir": "t", "model": {"path": "m"}, "data": {"path": "d"}} | sections
    )


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
        with (
            pytest.raises(ValueError, match="output_dir .*run: another run trains into this folder"),
            alone_in(tmp_path / "run"),
        ):
            pass
        with alone_in(tmp_path / "other"):
            pass
    with alone_in(tmp_path / "run"):
        pass


def test_a_requeued_job_waits_for_the_lock_of_a_node_that_died(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with alone_in(tmp_path):
        pass
    holder = subprocess.Popen(["flock", str(tmp_path / ".lock"), "sleep", "1"])
    time.sleep(0.3)
    with alone_in(tmp_path):
        assert holder.wait(5) == 0


def test_a_signal_in_a_clean_up_does_not_cut_it_short():
    done = []
    with Signals((signal.SIGTERM,)):
        try:
            pass
        finally:
            ignore_signals()
            signal.raise_signal(signal.SIGTERM)
            done.append("cleaned")
    assert done and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, "ignored meanwhile, though not handled"


def test_an_export_is_not_taken_for_the_run_beside_it(tmp_path):
    (tmp_path / "error_export_rank0.final.txt").write_text("no checkpoint")
    (tmp_path / "error_trainer_rank1.txt").write_text("lost")
    log = tmp_path / "trainer-1.log"
    log.write_text("")
    assert first_report(log) == "lost" and first_report(tmp_path / "export.log") == "no checkpoint"
    child = subprocess.Popen(["sleep", "1"])
    assert watch(child, log, first_report) == 0


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_with_the_status_that_shells_know(number, status):
    with pytest.raises(Ended) as caught, Signals((number,)):
        signal.raise_signal(number)
    assert caught.value.status == status
