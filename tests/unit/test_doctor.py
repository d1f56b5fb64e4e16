"""The doctor finds what is missing or clashes. Environments are real folders of package metadata."""

import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo import doctor

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """add(name, version, *requirements) puts a distribution's metadata into an otherwise empty search path."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = None\n")

    def add(name: str, version: str, *requirements: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        extras = [f"Provides-Extra: {extra}" for extra in ("cpu", "gpu", "cpu-engine")]
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            *extras,
            *(f"Requires-Dist: {r}" for r in requirements),
        ]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")

    return add


OURS = (
    "torch==2.13.0",
    "rich>=14",
    'sglang==0.5.21; extra == "cpu-engine"',
    'scipy; extra == "cpu"',
    'nvidia-thing; extra == "gpu"',
)


def statuses(gpu: bool = False) -> dict[str, str]:
    return {finding.what: finding.status for finding in doctor.package_findings(gpu)}


def test_complete_environment(environment):
    environment("megagrpo", "0.1", *OURS)
    environment("torch", "2.13.0+cpu", "filelock")
    environment("filelock", "3")
    environment("rich", "15.0")
    environment("scipy", "1.17")
    environment("sglang", "0.5.21", "cuda-python>=13")  # installed without its requirements: not followed
    found = statuses()
    assert set(found.values()) == {"ok"} and {"torch", "sglang"} <= set(found)


def test_missing_and_clashing(environment):
    environment("megagrpo", "0.1", *OURS)
    environment("torch", "2.12.0", "filelock>=4")
    environment("filelock", "3")
    findings = {finding.what: finding for finding in doctor.package_findings(gpu=False)}
    bad = {what for what, finding in findings.items() if finding.status == "error"}
    assert bad == {"torch", "sglang", "rich (for megagrpo)", "scipy (for megagrpo)", "filelock (for torch)"}
    assert findings["torch"].found == "2.12.0" and findings["torch"].wanted == "==2.13.0"
    assert all(findings[what].remedy for what in bad)


def test_not_installed(environment):
    assert statuses() == {"megagrpo": "error"}


def test_gpu_machine_wants_the_gpu_extra_and_a_cuda_build(environment, tmp_path):
    environment("megagrpo", "0.1", *OURS)
    environment("torch", "2.13.0")
    found = statuses(gpu=True)
    assert found["nvidia-thing (for megagrpo)"] == found["torch build"] == "error"
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    assert statuses(gpu=True)["torch build"] == "ok"


def test_short_of_memory_and_disk():
    assert doctor._at_least("disk", 11, 10, 5, "free some").status == "ok"
    assert doctor._at_least("disk", 7, 10, 5, "free some").status == "warning"
    assert doctor._at_least("disk", 4, 10, 5, "free some").status == "error"


def test_exit_status_and_imports():
    """The command agrees with its table, and a broken heavy library cannot stop it: none is imported."""
    code = (
        "import sys; from megagrpo.doctor import run_doctor; status = run_doctor()\n"
        "heavy = [m for m in ('torch', 'megatron', 'sglang', 'ray', 'transformers') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    assert ("ready" in done.stdout) == (done.returncode == 0) and ("BAD" in done.stdout) == (done.returncode == 1)
