"""Refreshes what README.md and docs/ copy from elsewhere, between a comment that names it and `<!-- end -->`.

`<!-- bench/results/NAME.md -->`  a measured table      `<!-- loop -->`    the loop of megagrpo/train.py
`<!-- rooms -->`                  the tree by folder    `<!-- layers -->`  what may import what
`<!-- modules -->`                the package by room      `<!-- presets -->`  the presets
`<!-- tests/unit/NAME.py -->`     what its table() returns    `<!-- last-device -->`  where bench/gpu.py last ran

python bench/readme.py
"""

import ast
import itertools
import json
import re
import runpy
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megagrpo"
_PLACE = re.compile(r"(?<=<!-- )(?!end )(\S+)( -->\n)(?:.*?\n)??(?=<!-- end -->)", re.DOTALL)
_SHORT = 98  # characters beside the name of a folder
_OTHER_FOLDERS = [
    ("configs/", "Experiments: quickstart, smollm2, calculator (laptop), gsm8k, 30B to 1T, and published examples"),
    ("launch/, slurm/", "Shell scripts: installation, quickstart, tests, one node of a cluster, Slurm jobs"),
    ("tests/", "unit/ (seconds), dist/ (gloo ranks), e2e/ (engines), cluster/ (Slurm, Ray, namespaces), gpu/ (CUDA)"),
    ("bench/", "Programs that measure; results/ holds what they wrote"),
]


def pages() -> list[Path]:
    """Returns README.md and the handbook."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def refreshed(text: str) -> str:
    """Returns the text of a page with every copied part as it is now at its source."""
    return _PLACE.sub(lambda place: f"{place[1]}{place[2]}{_copied(place[1]).strip()}\n", text)


def _copied(source: str) -> str:
    match source:
        case "loop":
            return f"```python\n{_loop()}\n```"
        case "rooms":
            return _tree([*((name, _shortened(text)) for name, text in _folders()), *_OTHER_FOLDERS])
        case "modules":
            return _tree([*_folders(), *_modules()])
        case "layers":
            return _layers()
        case "presets":
            return _presets()
        case "last-device":
            return last_device(ROOT / "bench" / "results")
    if source.endswith(".py"):
        return str(runpy.run_path(str(ROOT / source))["table"]())
    return (ROOT / source).read_text(encoding="utf-8")


def _loop() -> str:
    text = (PACKAGE / "train.py").read_text(encoding="utf-8")
    (function,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    start = next(node.lineno for node in function.body if isinstance(node, ast.For))
    return textwrap.dedent("\n".join(text.splitlines()[start - 1 : function.end_lineno]))


def _tree(lines: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in lines) + 2
    wrapped = [
        textwrap.fill(
            text, 120, initial_indent=name.ljust(width), subsequent_indent=" " * width, break_on_hyphens=False
        )
        for name, text in lines
    ]
    return "\n".join(["```", *wrapped, "```"])


def _folders() -> list[tuple[str, str]]:
    return [(f"megagrpo/{path.parent.name}/", _summary(path)) for path in sorted(PACKAGE.glob("*/__init__.py"))]


def _modules() -> list[tuple[str, str]]:
    return [(f"megagrpo/{path.name}", _summary(path)) for path in sorted(PACKAGE.glob("[a-z]*.py"))]


def _shortened(text: str) -> str:
    """Returns the first sentence, up to a comma that leaves it short enough for one line."""
    sentence = text.partition(". ")[0].rstrip(".")
    return sentence if len(sentence) <= _SHORT else sentence[:_SHORT].rpartition(",")[0]


def _summary(path: Path) -> str:
    """Returns the first paragraph of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def _layers() -> str:
    """Returns LAYERS of the architecture test, lowest first."""
    tree = ast.parse((ROOT / "tests" / "unit" / "test_architecture.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    layers = ast.literal_eval(assigned["LAYERS"])
    return "\n".join(f"{number}. {', '.join(sorted(parts))}" for number, parts in enumerate(layers, start=1))


def _presets() -> str:
    """Returns a table of the presets with the comment at the head of each file."""
    rows = []
    for path in sorted((PACKAGE / "config" / "presets").glob("*.yaml")):
        head = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        rows.append(f"| `{path.stem}` | {' '.join(line.removeprefix('#').strip() for line in head)} |")
    return "\n".join(["| preset | what it is |", "|---|---|", *rows])


def last_device(results: Path) -> str:
    """Returns on which GPU, when and at which commit bench/gpu.py last ran, or that it never did."""
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in results.glob("gpu_*.json")]
    reports = sorted((report for report in reports if report["device"] != "cpu"), key=lambda report: report["date"])
    if not reports:
        return (
            "No figure here was measured on a GPU: none was at hand yet. `bench/gpu.py` measures them on one, see "
            "[the GPU kit](#the-gpu-kit)."
        )
    last, ended = reports[-1], [section["status"] for section in reports[-1]["sections"]]
    return (
        f"`bench/gpu.py` last ran on {last['device']}, {last['date']}, commit {last['commit']}: "
        f"{ended.count('done')} of {len(ended)} sections to their end, {ended.count('unavailable')} lacked something."
    )


if __name__ == "__main__":
    for page in pages():
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
