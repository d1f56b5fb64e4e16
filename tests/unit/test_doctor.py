"""The doctor finds what is missing or clashes. Environments are real folders of package metadata."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo.tools import doctor

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """add(name, version, *requirements) puts a distribution's metadata into an otherwise empty search path."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def add(name: str, version: str, *requirements: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Provides-Extra: {extra}" for extra in ("cpu", "gpu", "te", "cpu-engine")]
        (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {r}" for r in requirements)]) + "\n")

    return add


ENGINE, CPU, GPU = ('sglang==0.5.21; extra == "cpu-engine"', 'scipy; extra == "cpu"', 'nvidia-thing; extra == "gpu"')
OURS = ("torch==2.13.0", "rich>=14", ENGINE, CPU, GPU)


def statuses(gpu: bool = False) -> dict[str, str]:
    return {finding.what: finding.status for finding in doctor.package_findings(gpu)}


def test_complete_environment(environment):
    environment("megagrpo", "0.1", *OURS)
    environment("torch", "2.13.0+cpu", "filelock")
    environment("sglang", "0.5.21", "cuda-python>=13")  # installed without its requirements: not followed
    for name, version in (("filelock", "3"), ("rich", "15.0"), ("scipy", "1.17")):
        environment(name, version)
    found = statuses()
    assert set(found.values()) == {"ok"} and {"torch", "sglang"} <= set(found)


def test_missing_and_clashing(environment):
    assert statuses() == {"megagrpo": "error"}
    environment("megagrpo", "0.1", *OURS)
    environment("torch", "2.12.0", "filelock>=4")
    environment("filelock", "3")
    findings = {finding.what: finding for finding in doctor.package_findings(gpu=False)}
    bad = {what for what, finding in findings.items() if finding.status == "error"}
    assert bad == {"torch", "sglang", "rich", "scipy"}
    assert findings["torch"].found == "2.12.0" and findings["torch"].wanted == "==2.13.0"
    assert all(findings[what].remedy for what in bad)


def test_what_pip_says_of_packages_among_each_other(environment):
    """On a CPU the engine's own requirements do not count: it is installed without them."""
    environment("megagrpo", "0.1", *OURS, "huggingface_hub")
    (found,) = doctor.judge_pip("huggingface-hub 1.0 requires tqdm, which is not installed.\n", gpu=False)
    assert found.status == "error", "pip prints names in one form"
    text = (
        "sglang 0.5.21 requires timm, which is not installed.\n"
        "torch 2.13.0 has requirement filelock>=4, but you have filelock 3.\n"
    )
    (found,) = doctor.judge_pip(text, gpu=False)
    assert found.status == "error" and found.found.startswith("torch ") and found.remedy
    assert len(doctor.judge_pip(text, gpu=True)) == 2
    (found,) = doctor.judge_pip("other 1 requires filelock, which is not installed.\n", gpu=False)
    assert found.status == "warning"  # nothing that a run needs
    (found,) = doctor.judge_pip("torch 2.13.0 is not supported on this platform\n", gpu=False)
    assert found.status == "error", "wheels of another machine"
    (found,) = doctor.judge_pip("/venv/bin/python gave no answer in 300 s", gpu=False)
    assert found.status == "warning" and "no answer" in found.found
    (found,) = doctor.judge_pip("No broken requirements found.\n", gpu=False)
    assert found.status == "ok"


def test_gpu_machine_wants_the_gpu_extra_and_a_cuda_build(environment):
    environment("megagrpo", "0.1", *OURS)
    environment("torch", "2.13.0")
    assert statuses(gpu=True)["nvidia-thing"] == "error"
    build = {"cuda": None, "gpus": [], "nccl": "", "why": ""}
    assert doctor._torch_build(build, gpu=True).status == "error"
    assert doctor._torch_build(build, gpu=False).found == "CPU only"
    assert doctor._torch_build(build | {"cuda": "13.0"}, gpu=True).status == "ok"
    broken = doctor._torch_build(build | {"why": "libcuda.so.1: cannot open"}, gpu=False)
    assert (broken.status, broken.found) == ("error", "libcuda.so.1: cannot open")


SEES = {"cuda": "13.0", "gpus": ["NVIDIA H100 80GB HBM3"] * 2, "nccl": "2.29.7", "why": ""}
BLIND = {
    "cuda": "13.0",
    "gpus": [],
    "nccl": "",
    "why": "The NVIDIA driver on your system is too old (found version 12040)",
}


@pytest.fixture
def on_gpus(environment, tmp_path, monkeypatch):
    """on_gpus(...) returns the findings of a machine with this driver, this answer of torch, and these packages."""
    environment("megagrpo", "0.1", *OURS, 'transformer-engine[core_cu13,pytorch]>=2.9,<2.15; extra == "te"')
    environment("torch", "2.13.0")

    def findings(driver, answer, engine="2.14.1", torch_part=True, nvcc="toolkit/13.0"):
        programs = tmp_path / nvcc / "bin"
        programs.mkdir(parents=True, exist_ok=True)
        for name in ("nvcc", "ninja"):
            (programs / name).write_text(f"#!/bin/sh\necho Cuda compilation tools, release {nvcc[-4:]}\n")
            (programs / name).chmod(0o755)
        monkeypatch.setattr(doctor, "_NVCC", "/nowhere")
        monkeypatch.setenv("PATH", str(programs) if nvcc.startswith("toolkit") else "/nowhere")
        for name in ("transformer-engine", *(["transformer-engine-torch"] if torch_part else [])):
            if engine and doctor._version(name) is None:
                environment(name, engine)
        monkeypatch.setattr(doctor, "driver_version", lambda: driver)
        return {finding.what: finding for finding in doctor.gpu_findings(answer)}

    return findings


def test_a_gpu_machine_that_fits(on_gpus):
    found = on_gpus("580.65.06", SEES)
    assert {finding.status for finding in found.values()} == {"ok"}
    assert found["NVIDIA driver"].wanted == ">=580 for CUDA 13.0" and found["NCCL of torch"].found == "2.29.7"
    assert found["GPUs that torch sees"].found == "2: NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    "nvcc, found, remedy",
    [
        ("toolkit/12.8", "CUDA 12", "install the toolkit of CUDA 13.0, or pip install nvidia-cuda-nvcc==13.0.*"),
        ("nvidia/cu13", "none", "export CUDA_HOME="),  # pip's own, which SGLang does not look for
        ("elsewhere/13.0", "none", "install the toolkit"),
    ],
)
def test_kernels_that_engines_compile_need_a_toolkit_of_torchs_cuda(
    on_gpus, monkeypatch, tmp_path, nvcc, found, remedy
):
    judged = on_gpus("580.65.06", SEES, nvcc=nvcc)["CUDA toolkit (nvcc)"]
    assert judged.status == "error" and judged.found.endswith(found) and remedy in judged.remedy
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit/13.0"))
    on_gpus("580.65.06", SEES)
    assert doctor._toolkit("13.0")[0].status == "ok"


@pytest.mark.parametrize(("home", "status"), [("/proc/none", "error"), ("", "error"), (str(ROOT), "ok")])
def test_kernels_that_engines_compile_need_a_home(on_gpus, monkeypatch, home, status):
    """Triton and others keep them below it; users of some containers have none, or that of another user."""
    monkeypatch.setenv("HOME", home)
    judged = on_gpus("580.65.06", SEES)["HOME"]
    assert judged.status == status and bool(judged.remedy) == (status == "error")


def test_a_gpu_machine_without_any_package_is_diagnosed(environment, monkeypatch):
    monkeypatch.setattr(doctor, "driver_version", lambda: "580.65.06")
    answer = BLIND | {"cuda": None}
    found = {finding.what: finding.status for finding in doctor.gpu_findings(answer)}
    assert found == {"NVIDIA driver": "ok", "GPUs that torch sees": "error", "transformer-engine": "warning"}


def test_a_driver_too_old_or_missing(on_gpus):
    found = on_gpus("550.54.15", BLIND)
    bad = {what for what, finding in found.items() if finding.status == "error"}
    assert bad == {"NVIDIA driver", "GPUs that torch sees"}
    assert "newer driver" in found["NVIDIA driver"].remedy and "too old" in found["GPUs that torch sees"].found
    assert on_gpus("550.54.15", SEES | {"cuda": "12.9"})["NVIDIA driver"].status == "ok"
    assert on_gpus("550.54.15", SEES)["NVIDIA driver"].status == "ok", "by cuda-compat-13-0"

    found = on_gpus(None, BLIND | {"why": ""})
    assert found["NVIDIA driver"].found == "none found" and found["NVIDIA driver"].status == "error"
    assert found["GPUs that torch sees"].found == "none"
    assert "CUDA_VISIBLE_DEVICES" in found["GPUs that torch sees"].remedy


@pytest.mark.parametrize(
    "version, torch_part, status, remedy",
    [
        (None, True, "warning", "without it"),
        ("2.20.2", True, "error", "pip uninstall"),
        ("2.8.0", True, "error", "pip uninstall"),
        ("2.14.1", False, "error", "was not built"),
    ],
)
def test_transformer_engine_out_of_bounds_or_in_part(on_gpus, version, torch_part, status, remedy):
    found = on_gpus("580.65.06", SEES, engine=version, torch_part=torch_part)["transformer-engine"]
    assert (found.status, found.wanted) == (status, "<2.15,>=2.9") and remedy in found.remedy


def test_torch_is_asked_in_another_process(environment, monkeypatch):
    monkeypatch.setattr(doctor, "_ASK_TORCH", """print('noise'); print('{"cuda": null}')""")
    assert doctor.ask_torch() == {"cuda": None}
    monkeypatch.setattr(doctor, "_ASK_TORCH", "raise ImportError('libcuda.so.1: cannot open')")
    assert doctor.ask_torch()["why"] == "ImportError: libcuda.so.1: cannot open"
    monkeypatch.setattr(doctor, "_ASK_TORCH", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "_LIMIT_S", 0.2)
    assert "gave no answer" in doctor.ask_torch()["why"]


def test_brackets_of_packages_and_paths_are_shown(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_run", lambda words: "ray 2 has requirement fastapi[standard]>=1: [/usr/lib/x.so]")
    monkeypatch.setenv("COLUMNS", "400")
    doctor.run(argparse.Namespace())
    assert "fastapi[standard]>=1: [/usr/lib/x.so]" in capsys.readouterr().out


def test_a_file_that_is_no_program_is_named(tmp_path):
    (tmp_path / "nvcc").write_text("")
    assert "Permission denied" in doctor._run([str(tmp_path / "nvcc"), "--version"])


def test_short_of_memory_and_disk():
    found = [doctor.at_least("disk", size, 10, 5, "free some").status for size in (11, 7, 4)]
    assert found == ["ok", "warning", "error"]


def test_exit_status_and_imports():
    """The command agrees with its table, and a broken heavy library cannot stop it: none is imported."""
    code = (
        "import sys; from megagrpo.tools.doctor import run; status = run(None)\n"
        "heavy = [m for m in ('torch', 'megatron', 'sglang', 'ray', 'transformers') if m in "
        "sys.modules]\n"
        "assert not heavy, heavy\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    assert ("ready" in done.stdout) == (done.returncode == 0) and ("BAD" in done.stdout) == (done.returncode == 1)


@pytest.mark.parametrize(
    "package, module, source, found",
    [
        (
            "transformer-engine",
            "transformer_engine.pytorch",
            "import onnxscript_that_nobody_brought",
            "ModuleNotFoundError: No module named 'onnxscript_that_nobody_brought'",
        ),
        (
            "sglang-kernel",
            "sgl_kernel",
            "raise ImportError('libcudart.so.12: cannot open shared object file')",
            "ImportError: libcudart.so.12: cannot open shared object file",
        ),
        ("flashinfer-python", "flashinfer", "import os; os._exit(3)", "it ended without a word"),
        ("flashinfer-python", "flashinfer", "", "works"),
    ],
)
def test_what_is_compiled_for_gpus_is_imported_in_another_process(
    environment, tmp_path, monkeypatch, package, module, source, found
):
    environment(package, "1.0")
    folder = tmp_path.joinpath("modules", *module.split("."))
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(source + "\n")
    (tmp_path / "modules" / "torch.py").touch()  # imported first
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    (finding,) = doctor.import_findings(driver=True)
    assert (finding.what, finding.found) == (f"import {module}", found)
    assert finding.status == ("ok" if found == "works" else "error")
    assert found == "works" or "install.sh --repair" in finding.remedy


def test_a_login_node_without_a_driver_is_judged_by_what_was_installed(environment, tmp_path, monkeypatch):
    """As after MEGAGRPO_KIND=gpu: SGLang's kernels load the driver's library, Transformer Engine does not."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert not doctor.is_for_gpus()
    for kind in ("cpu", "gpu"):
        (tmp_path / ".megagrpo-installed").write_text(f"{kind} digest folder\n")
        assert doctor.is_for_gpus() == (kind == "gpu")
    environment("sglang-kernel", "1.0")
    environment("transformer-engine", "1.0")
    (tmp_path / "torch.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine, kernels = doctor.import_findings(driver=False)
    assert (kernels.status, kernels.found) == ("warning", "not tried here: no driver")
    assert engine.status == "error", "another package is tried"
