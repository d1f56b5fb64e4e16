"""Copies the tables of bench/results into the README, below the comments that name them: `<!-- bench/results/NAME.md -->`.

python bench/readme.py
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PLACE = re.compile(r"(<!-- (bench/results/\w+\.md) -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)


def refreshed(text: str) -> str:
    """README text with every named table, and the line that says where it was measured, as in its file."""
    return _PLACE.sub(lambda place: place[1] + (ROOT / place[2]).read_text().strip() + place[4], text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(refreshed(readme.read_text()))
