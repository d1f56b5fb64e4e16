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


HEADERS = ("cuda_runtime.h", "cudnn.h", "nccl.h", "cublas_v2.h", "cusolverDn.h", "cusparse.h", "nvtx3/nvToolsExt.h")
PYTHON = """#!/bin/sh
echo "$@" >>{folder}/words
case "$*" in
    *torch.version.cuda*) echo {cuda} ;;
    *nvidia.__path__*) echo {folder}/nvidia ;;
    *"pip wheel"*) echo "$CUDA_HOME $CPATH" >{folder}/variables; {wheel} ;;
esac
"""


@pytest.mark.parametrize(
    "planted, says",
    [
        ({}, ""),
        ({"without": "te"}, ""),
        ({"cuda": ""}, "is built without CUDA"),
        ({"cuda": "12.9"}, "is for CUDA 12.9"),
        ({"lacks": "cudnn.h"}, "cudnn.h is in none of"),
        ({"lacks": "nvcc"}, "bin/nvcc is missing: package nvidia-cuda-nvcc"),
        ({"wheel": "exit 1"}, ""),  # the compiler says why
    ],
)
def test_transformer_engine_may_fail_or_be_left_out(planted, says, tmp_path):
    """install_gpu itself, with a python that notes its words, over planted CUDA packages of torch."""
    python, cuda = tmp_path / "bin" / "python", tmp_path / "nvidia" / "cu13"
    for path in (
        python,
        cuda / "bin" / "nvcc",
        *(tmp_path / "nvidia" / "cudnn" / "include" / name for name in HEADERS),
    ):
        if path.name != planted.get("lacks"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o755)
    wheel = "touch {}/transformer_engine_torch-2.11.0-cp311.whl".format(
        "$(echo $* | sed 's/.*--wheel-dir //; s/ .*//')"
    )
    values = {"cuda": "13.0", "wheel": wheel, "folder": tmp_path} | planted
    python.write_text(PYTHON.format_map(values))
    script = (ROOT / "launch" / "install.sh").read_text()
    functions = script[script.index("say() {") : script.index("repair=no")]
    without = planted.get("without", "")
    code = f"set -euo pipefail\nvenv={tmp_path}\nwithout={without!r}\n{functions}\ninstall_gpu\necho went on\n"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "went on" in done.stdout, done.stderr
    words = (tmp_path / "words").read_text()
    assert ".[gpu,test,lint]" in words.splitlines()[0] and "--no-build-isolation" not in words.splitlines()[0]
    assert ("could not be built" in done.stderr) == bool(planted.keys() - {"without"})
    assert says in done.stderr and ("--no-build-isolation" in words) == (not says and not without)
    if not planted:  # headers of torch's own packages, of a toolkit nothing
        assert (tmp_path / "variables").read_text().split(":")[0] == f"{cuda} {tmp_path}/nvidia/cudnn/include\n"
