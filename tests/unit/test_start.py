"""What processes import at their start, and a status that is printed again and again."""

import ctypes
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from megagrpo import cli
from megagrpo.cluster.machine import write_experiment
from megagrpo.rollout.service.engine_command import environment_without_gpu
from megagrpo.system.environment import visible_gpus
from megagrpo.tools import status
from tests import experiments


@pytest.mark.parametrize(("driver", "gpus"), [(False, []), (True, ["0", "1"])])
def test_torch_is_asked_for_gpus_only_beside_their_driver(driver, gpus, monkeypatch):
    load = ctypes.CDLL

    def driver_library(name: str) -> object:
        assert name == "libcuda.so.1"
        return load(None if driver else "libabsent.so.1")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", driver_library)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 2)))
    assert visible_gpus() == gpus


PROCESSES = {
    "a rank on a CPU": """
from megagrpo.actor.host import prepare_host
prepare_host("cpu")
import sys, torch
assert "torch._inductor.compile_fx" not in sys.modules
assert torch.compile(len) is torch.compile(mode="default")(len) is len
""",
    "a process of an engine": """
import runpy, sys
runpy.run_module("megagrpo.rollout.service.engine_process", run_name="__mp_main__")
assert sys.modules["megatron"] is sys.modules["mcp"] is None
""",
    "a service of engines on this machine": """
import megagrpo.rollout.service.server, sys
assert not {"ray", "torch", "transformers"} & set(sys.modules)
""",
    "large imports": """
import gc
from megagrpo.system.processes import lasting_imports
for failure in (None, ImportError):
    try:
        with lasting_imports():
            assert not gc.isenabled()
            if failure:
                raise failure
    except ImportError:
        pass
    assert gc.isenabled() and gc.get_freeze_count() > 1000
    gc.unfreeze()
""",
}


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_starts_without_what_it_does_not_use(name):
    env = environment_without_gpu() if "engine" in name else None
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROCESSES[name]], env=env, check=True, timeout=240)


@pytest.mark.parametrize(("words", "pause"), [([], 10), (["3"], 3)])
def test_a_watched_status_goes_on_until_it_is_interrupted(words, pause, tmp_path, capsys, monkeypatch):
    config = experiments.experiment(output_dir=str(tmp_path / "run"))
    write_experiment(config)
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=sleep, strftime=time.strftime, time=time.time))
    assert cli.main(["status", str(config.run_folder.path), "--watch", *words]) == 130
    said = capsys.readouterr().out
    assert pauses == [pause] * 3 and said.count(f"{config.name}: step 0") == 3 and "\033" not in said
    with pytest.raises(SystemExit):
        cli.main(["status", str(config.run_folder.path), "--watch", "--json"])
