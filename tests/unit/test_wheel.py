"""A built wheel, installed alone, has all that `megagrpo check` with a preset needs."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from examples.laptop.model import character_tokenizer

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = """\
name: from_a_wheel
output_dir: run
preset: dapo
model: {path: model}
data: {path: data/train.jsonl}
"""


def run(*words, cwd: Path, status: int = 0) -> subprocess.CompletedProcess:
    """Runs a command that sees neither this checkout nor the caller's Python settings, to an end with `status`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The Python of an empty environment into which a wheel of this package was installed, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    source, environment = folder / "source", folder / "environment"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megagrpo", source / "megagrpo", ignore=ignored)  # a build leaves files in its source folder
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder)
    (wheel,) = folder.glob("megagrpo-*.whl")
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    run(*pip, "--python", python, "install", "--no-deps", wheel, cwd=folder)
    # Other people's packages come from the environment of the tests. The .pth files in a folder that a .pth names are
    # not read, so an editable installation of this checkout stays out of reach.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def empty(tmp_path) -> Path:
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "configs" / "models" / "Qwen3-8B" / "config.json", tmp_path / "model")
    character_tokenizer("12+=").save_pretrained(tmp_path / "model")
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


def test_every_file_of_the_package_is_in_the_wheel_and_imported_from_there(installed, empty):
    done = run(installed, "-c", "import megagrpo; print(megagrpo.__file__)", cwd=empty)
    (package,) = installed.parents[1].glob("lib/python*/site-packages/megagrpo")
    assert Path(done.stdout.strip()).parent == package, done.stdout + done.stderr
    ours = {path.relative_to(ROOT / "megagrpo") for path in (ROOT / "megagrpo").rglob("*") if path.is_file()}
    theirs = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    assert {path for path in ours - theirs if "__pycache__" not in path.parts} == set()
    assert (package / "py.typed").is_file()


def test_check_explains_an_experiment_with_a_preset(installed, empty):
    done = run(installed.parent / "megagrpo", "check", "experiment.yaml", cwd=empty)
    assert "1/N_tok sum_it [-min(rho A, clip(rho) A)]" in done.stdout, "the preset's objective"
    words = ("check", "experiment.yaml", "--set", "preset=dappo")
    unknown = run(installed.parent / "megagrpo", *words, cwd=empty, status=2)
    assert unknown.stdout == "" and "Traceback" not in unknown.stderr
    assert "did you mean 'dapo'?" in unknown.stderr
