"""The container recipes, step by step in a scratch folder, where programs that install only note their words."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.package_source import ROOT
from tests.unit.test_installation import HEADERS, PYTHON

FOLDER = ROOT / "launch" / "container"
# apt-get and Ubuntu's python3, which makes an environment from the folder of the next one
APT = """#!/bin/sh
echo "$@" >>{folder}/apt
case "$1" in update) touch {lists}/index ;; install) [ -e {lists}/index ] ;; esac
"""
UBUNTU = """#!/bin/sh
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" "$3/lib/python3.12/site-packages" && cp {folder}/environment/* "$3/bin" ;;
esac
"""
MEGAGRPO = '#!/bin/sh\necho "megagrpo $*"\n'


class Image:
    """A scratch folder in the place of an image's root: absolute paths of a recipe become paths in it."""

    def __init__(self, folder: Path):
        self.folder, self.checkout, self.lists = folder, folder / "megagrpo", folder / "lists"
        self.variables, self.here = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": str(folder)}, folder
        nvidia = folder / "nvidia"
        headers = [nvidia / "cudnn" / "include" / name for name in HEADERS]
        for path in (nvidia / "cu13" / "bin" / "nvcc", *headers):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o755)
        self.lists.mkdir()
        wheel = "touch {}/transformer_engine_torch-2.14.1-cp312.whl".format(
            "$(echo $* | sed 's/.*--wheel-dir //; s/ .*//')"
        )
        values = {"folder": folder, "lists": self.lists, "cuda": "13.0", "wheel": wheel, "imports": "exit 0"}
        programs = {
            "bin/apt-get": APT,
            "bin/g++": "#!/bin/sh\n",
            **dict.fromkeys(("bin/python3", "bin/python3.12"), UBUNTU),
            "environment/python": PYTHON,
            "environment/megagrpo": MEGAGRPO,
        }
        for name, text in programs.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.format_map(values))
            path.chmod(0o755)

    def inside(self, text: str) -> str:
        """The text with the image's paths as paths of the scratch folder. No other folder is written to."""
        moved = re.sub(r"/var/lib/apt/lists\b", str(self.lists), text)
        moved = re.sub(r"(?<![\w.$}/])/megagrpo\b", str(self.checkout), moved)
        for path in re.findall(r"(?<![\w.$}:/'])/[\w./-]+", moved):
            assert path.startswith((str(self.folder), "/usr/local/cuda")), f"{path} is of no stand-in"
        return moved

    def copy_checkout(self, ignored: tuple[str, ...]) -> None:
        """Copies what an installation reads, and an installation and results of the machine that builds the image."""
        leave_out = shutil.ignore_patterns(*ignored)
        self.checkout.mkdir()
        for name in (".venv", "runs", "models", "data", ".ruff_cache"):
            if not leave_out("", [name]):
                (self.checkout / name).mkdir()
        shutil.copytree(ROOT / "launch", self.checkout / "launch")
        for name in ("pyproject.toml", ".dockerignore"):
            shutil.copy(ROOT / name, self.checkout)
        if (self.checkout / ".venv").is_dir():
            (self.checkout / ".venv" / ".megagrpo-installed").write_text("cpu")

    def run(self, script: str, *words: str) -> str:
        """What a script of the recipe prints, run as an image's builder runs it: by sh."""
        command = ["sh", "-ec", self.inside(script), "sh", *words]
        options = {"cwd": self.here, "env": self.variables, "capture_output": True, "text": True}
        done = subprocess.run(command, timeout=60, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def assign(self, assignments: str) -> None:
        """Sets variables, as ENV and ARG do."""
        for assignment in shlex.split(self.inside(assignments)):
            name, _, value = assignment.partition("=")
            self.variables[name] = value.replace("$PATH", self.variables["PATH"])


def by_docker(image: Image) -> list[str]:
    """Runs the Dockerfile. Returns the image it starts from, and what the container prints."""
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    base = printed = ""
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        match word:
            case "FROM":
                base = rest
            case "ARG" | "ENV":
                image.assign(rest)
            case "WORKDIR":
                image.here = Path(image.inside(rest))
            case "COPY":
                assert rest == ". ."
                image.copy_checkout(tuple((ROOT / ".dockerignore").read_text().split()))
            case "RUN":
                image.run(rest)
            case "CMD":
                printed = image.run(shlex.join(json.loads(rest)))
            case _:
                assert not word or word == "#", f"{word} is not run here"
    return [base, printed]


def by_apptainer(image: Image) -> list[str]:
    """Runs the definition. Returns the image it starts from, and what the container prints."""
    head, *rest = re.split(r"^%(?=\w+\n)", (FOLDER / "megagrpo.def").read_text(), flags=re.MULTILINE)
    sections = {name: text for name, _, text in (part.partition("\n") for part in rest)}
    assert sections.keys() == {"files", "post", "environment", "runscript"}
    assert sections["files"].split() == [".", "/megagrpo"]
    image.copy_checkout(())
    image.run(sections["post"])
    printed = image.run(sections["environment"] + sections["runscript"], "--help")
    return [re.search("^From: (.*)", head, re.MULTILINE)[1], printed]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, tuple[Image, list[str]]]:
    images = {}
    for build in (by_docker, by_apptainer):
        image = Image(tmp_path_factory.mktemp(build.__name__))
        images[build.__name__] = (image, build(image))
    return images


@pytest.mark.parametrize("builder", ["by_docker", "by_apptainer"])
def test_every_step_of_a_container_recipe_runs(builder, built):
    """In the place of programs that install something stand others that note their words."""
    image, (base, printed) = built[builder]
    assert base.startswith("nvidia/cuda:13.") and printed == "megagrpo --help\n"
    assert [line.split()[0] for line in (image.folder / "apt").read_text().splitlines()] == ["update", "install"]
    assert not list(image.lists.iterdir()), "the lists of packages stay in no image"
    stamp = (image.checkout / ".venv" / ".megagrpo-installed").read_text()
    assert stamp.startswith("gpu ") and stamp.endswith(f" {image.checkout}\n")
    assert not [name for name in ("runs", "models", "data", ".ruff_cache") if (image.checkout / name).exists()]
    words = (image.folder / "words").read_text().splitlines()
    assert any("--editable .[gpu,test,lint]" in line for line in words)
    assert any("--no-build-isolation" in line for line in words), "Transformer Engine is compiled"
    # others load libcuda.so.1 of a driver
    assert words[-1] == "-c import torch, transformer_engine.pytorch"


def test_the_container_recipes_are_one_installation(built):
    (docker, (base, _)), (apptainer, (same, _)) = built.values()
    assert base == same
    for name in ("apt", "words"):
        said = [re.sub(r"/\S*", "", (image.folder / name).read_text()) for image in (docker, apptainer)]
        assert said[0] == said[1], name
