"""The README names every source file, the loop's own calls, and nothing that does not exist."""

import re
from pathlib import Path

from bench.readme import refreshed

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_every_source_file_has_its_line():
    tree = README[README.index("## The tree") : README.index("## Options")]
    named = set(re.findall(r"^ {6,8}(\w+\.py) ", tree, re.MULTILINE))
    files = {p.name for p in (ROOT / "megagrpo").rglob("*.py") if p.name != "__init__.py" and "cpu" not in p.parts}
    assert files - named == set(), "files without a line in the README's tree"
    assert named - files == set(), "lines in the README's tree without a file"


def test_the_loop_in_the_readme_is_the_one_that_runs():
    loop = README[README.index("## The loop") : README.index("That is `megagrpo/train.py`")]
    source = (ROOT / "megagrpo" / "train.py").read_text()
    for call in re.findall(r"(?:run\.)?\w+(?=\()", loop):
        assert f"{call}(" in source, f"{call} is in the README's loop and not in train.py"


def test_measured_tables_are_those_of_the_results():
    assert README.count("<!-- bench/results/") >= 2
    assert refreshed(README) == README, "python bench/readme.py copies them"
