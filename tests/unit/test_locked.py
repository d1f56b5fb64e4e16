"""launch/locked_*.txt: the same packages next month, of every requirement and of theirs; and how they are left."""

import importlib.metadata
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.unit.package_source import ROOT
from tests.unit.test_containers import Image

# extras; of the other ones requirements are left out
WHOLE = {"cpu": ("cpu", "test", "lint", "wandb"), "gpu": ("gpu", "test", "lint")}
ALONE = {"cpu": ("cpu-engine", "smollm2"), "gpu": ()}
# torch pins the CUDA packages that it needs, and a build for CPUs has none; and it may be what a lock is not asked for
UNASKED = {"cpu": "megagrpo|triton|nvidia|cuda", "gpu": "megagrpo"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(kind: str) -> dict[str, str]:
    text = (ROOT / "launch" / f"locked_{kind}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    versions = {normal(name): version for name, version in (line.split("==") for line in lines)}
    assert len(versions) == len(lines), "one line a package"
    return versions


def installed_requirements(name: str, extras: set[str]) -> list[Requirement]:
    """What an installed package requires here; nothing if it is not installed."""
    try:
        texts = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = list(map(Requirement, texts))
    asked = [{"extra": extra} for extra in ("", *extras)]
    return [one for one in found if not one.marker or any(map(one.marker.evaluate, asked))]


@pytest.mark.parametrize("kind", WHOLE)
def test_every_version_is_locked_and_admitted(kind):
    versions = locked(kind)
    for version in versions.values():
        assert not Version(version).local, "which is the machine's"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    todo = [(Requirement(text), True) for name in WHOLE[kind] for text in extras[name]]
    todo += [(Requirement(text), False) for name in ALONE[kind] for text in extras[name]]
    todo += [(Requirement(text), True) for text in project["dependencies"]]
    seen = set()
    while todo:
        one, whole = todo.pop()
        key = (one.name, frozenset(one.extras))
        if key in seen or re.match(UNASKED[kind], one.name):
            continue
        seen.add(key)
        version = versions.get(normal(one.name))
        assert version, f"{one} is in no line of locked_{kind}.txt"
        assert one.specifier.contains(version, prereleases=True), f"locked_{kind}.txt has {version} of {one}"
        todo += [(other, True) for other in installed_requirements(one.name, one.extras) if whole]
    assert len(seen) > 100


@pytest.fixture
def image(tmp_path) -> Image:
    image = Image(tmp_path)
    image.copy_checkout((".venv", "runs", ".ruff_cache"))
    image.here = image.checkout
    image.variables["MEGAGRPO_KIND"] = "cpu"
    return image


def install(image: Image, *options: str) -> tuple[list[bool], bool]:
    """Runs launch/install.sh. Returns whether each call of pip has the versions, and whether all was up to date."""
    words = image.folder / "words"
    words.write_text("")
    said = image.run('bash launch/install.sh "$@"', *options)
    calls = [line for line in words.read_text().splitlines() if line.startswith("-m pip install --no-compile")]
    return ["--constraint launch/locked_cpu.txt" in line for line in calls], "is up to date" in said


def test_an_installation_has_the_locked_versions_until_it_is_unlocked(image):
    assert install(image) == ([True] * 3, False)
    assert install(image) == ([], True)
    assert install(image, "--with", "smollm2") == ([True], True)
    assert install(image, "--unlocked", "--with", "smollm2") == ([False] * 4, False)
    assert install(image, "--with", "smollm2") == ([False], True), "launch/test.sh tests the newest versions, too"
    with (image.checkout / "launch" / "locked_cpu.txt").open("a") as lock:
        lock.write("# another\n")
    assert install(image) == ([True] * 3, False)
