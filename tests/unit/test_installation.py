"""Everything that a GPU machine installs resolves together, without installing it. Needs a package index.

pip chooses files for the named Python and platform, and evaluates markers for the Python that runs it.
"""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Released as source alone, which pip would have to build to read its metadata: version -> its requirements. A wheel
# without content stands for each; the first is a stub whose build fetches the real one from NVIDIA's index.
SOURCES = {
    ("cuda-tile", "1.6.0rc5"): (),
    **{
        ("transformer-engine-torch", f"2.{minor}.0"): (
            "torch>=2.1", "einops", "onnxscript", "onnx", "packaging", "pydantic", "nvdlfw-inspect",
        )
        for minor in (9, 10, 11)
    },
}  # fmt: skip
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)]
PLATFORMS += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64"]
UNREACHABLE = r"from versions: none|Could not fetch|Connection|Temporary failure|Max retries"


def stand_in(folder: Path, name: str, version: str, requirements: tuple[str, ...]) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        text = "\n".join([*metadata, *(f"Requires-Dist: {requirement}" for requirement in requirements)]) + "\n"
        wheel.writestr(f"{stem}.dist-info/METADATA", text)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{stem}.dist-info/WHEEL", tags)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_extras_gpu_and_te_resolve_on_linux(python, tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["gpu"], *extras["te"]]
    (tmp_path / "wheels").mkdir()
    for (name, version), requirements in SOURCES.items():
        stand_in(tmp_path / "wheels", name, version, requirements)
    abi = "cp" + python.replace(".", "")
    words = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    words += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--abi", abi]
    words += ["--abi", "abi3", "--abi", "none", *(word for name in PLATFORMS for word in ("--platform", name))]
    words += ["--target", str(tmp_path / "none"), "--report", str(tmp_path / "report.json")]
    words += ["--find-links", str(tmp_path / "wheels"), *wanted]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0 and re.search(UNREACHABLE, done.stderr):
        pytest.skip(f"no package index is reachable: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    packages = [entry["metadata"] for entry in report["install"]]
    found = {package["name"].lower().replace("_", "-"): package["version"] for package in packages}
    print(f"Python {python}: {len(found)} packages, " + ", ".join(f"{n} {found[n]}" for n in ("torch", "sglang")))
    assert found["transformer-engine"] == found["transformer-engine-torch"] == "2.11.0"
    assert found["torch"].startswith("2.13.0") and found["sglang"] == "0.5.21" and found["megatron-core"] == "0.16.1"


@pytest.mark.parametrize("without, built", [("", True), ("", False), ("te", None)])
def test_transformer_engine_may_fail_or_be_left_out(without, built, tmp_path):
    """install_gpu itself, with a python that notes its words and may fail to build; SGLang is built in isolation."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    fails = 'case "$*" in *--no-build-isolation*) exit 1;; esac' if built is False else ""
    python.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/words\ncat >/dev/null </dev/null\n{fails}\n')
    python.chmod(0o755)
    script = (ROOT / "launch" / "install.sh").read_text()
    functions = script[script.index("say() {") : script.index("repair=no")]
    code = f"set -euo pipefail\nvenv={tmp_path}\nwithout={without!r}\n{functions}\ninstall_gpu\necho went on\n"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "went on" in done.stdout, done.stderr
    steps = [line for line in (tmp_path / "words").read_text().splitlines() if "pip install" in line]
    assert ".[gpu,test,lint]" in steps[0] and "--no-build-isolation" not in steps[0]
    assert ("--no-build-isolation" in steps[-1]) == (without == "") and "NVTE_BUILD_USE_NVIDIA_WHEELS=1" in functions
    assert ("could not be built" in done.stderr) == (built is False)
