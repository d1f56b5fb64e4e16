"""Prints the tests that belong to the files that differ from main, nearest first.

usage: python tests/changed.py [BASE]     BASE: what is compared with, main unless named

A test belongs to a Python file if it imports it, through other files or not; to any other file if
its text has the file's or its folder's name in quotes; to all files of a folder if READERS says so.
launch/test.sh --changed runs those of tests/unit and names the others, whose programs may reach a
file by a command line.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("megagrpo", "tests", "bench", "examples")
PATHS = ("", "tests", "tests/dist/workers", "tests/e2e", "bench")  # which imports begin with
READERS = {  # folder -> tests/unit/test_*.py that read every file below it: limits of size, pages, planted faults
    "megagrpo": ("architecture", "density", "device_index", "docs", "plant"),
    "bench": ("architecture", "bench"),
    "docs": ("docs",),
    "tests": ("architecture", "bench"),
}
PROGRAM = re.compile(rf"^(?:(?=.*\.py$)|(?=(?:{'|'.join(FOLDERS)})\.))([\w.]+?)(?:\.py|:\w+)?$")


def changed(base: str) -> set[Path]:
    """Files that differ from where this branch left base, and files that git does not track yet."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout

    start = git("merge-base", base, "HEAD").strip()
    names = git("diff", "--name-only", start) + git("ls-files", "-o", "--exclude-standard")
    return {Path(name) for name in names.splitlines()}


@cache
def imports(file: Path) -> frozenset[Path]:
    """Python files of the repository that a file names, in imports or as a program that it starts."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(file.parts[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (package, node.module)))
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = PROGRAM.findall(node.value)
        found.update(path for name in filter(None, names) for path in files_of_module(file, name))
    return frozenset(found)


def files_of_module(file: Path, name: str) -> Iterator[Path]:
    path = Path(*name.split("."))
    for folder in (str(file.parent), *PATHS):
        for candidate in (Path(folder, path).with_suffix(".py"), Path(folder, path, "__init__.py")):
            if candidate.parts[0] in FOLDERS and (ROOT / candidate).is_file():
                yield candidate


def distances(test: Path) -> dict[Path, int]:
    """How many imports lie between a test and each file that it reaches.

    Of what a conftest.py imports for some tests nothing counts, because that is most of the package.
    """
    reached, edge = {test: 0} | {folder / "conftest.py": 1 for folder in test.parents}, [test]
    while edge:
        edge = [path for file in edge for path in imports(file) if path not in reached]
        reached |= dict.fromkeys(edge, max(reached.values()) + 1)
    return reached


def nearest_first(files: Collection[Path]) -> list[Path]:
    """The test files that belong to any of files."""
    python = {file for file in files if file.suffix == ".py"}
    names = {name for file in files if file.suffix != ".py" for name in (file.name, file.parent.name) if name}
    quoted = re.compile("|".join(rf"[\"'/]{re.escape(name)}[\"'/]" for name in names) or r"(?!)")
    folders = {file.parts[0] for file in files} & READERS.keys()
    readers = {Path("tests", "unit", f"test_{name}.py") for folder in folders for name in READERS[folder]}
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        test = path.relative_to(ROOT)
        near = [steps for file, steps in distances(test).items() if file in python]
        near += [1] if test in readers or quoted.search(path.read_text()) else []
        if near:
            found[test] = min(near)
    return sorted(found, key=lambda test: (found[test], test))


if __name__ == "__main__":
    print(*nearest_first(changed(*sys.argv[1:] or ["main"])), sep="\n")
