"""Small repositories with a bug each: the rows of configs/repositories.yaml, and its warm-up, in which the
right command is one of four. Only the tests of a repository tell which.
"""

import random
from pathlib import Path
from typing import Any

TASKS = Path(__file__).resolve().parents[1] / "repositories"
_SLUGS = """'s/return .*/return "-".join(re.findall("[a-z0-9]+", {}))/' slugs.py"""
_PLAIN = (
    '__import__("unicodedata").normalize("NFKD", title.lower()).encode("ascii", "ignore").decode()'
)
COMMANDS = {  # the first is right
    "interval": (
        "'s/start < merged/start <= merged/' intervals.py",
        "'s/start < merged/start > merged/' intervals.py",
        "'s/max(end/min(end/' intervals.py",
        "'s/sorted(intervals)/intervals/' intervals.py",
    ),
    "ledger": (
        "'6{h;d};7G' ledger/transfers.py",
        "'6d' ledger/transfers.py",
        "'7d' ledger/transfers.py",
        "'s/</<=/' ledger/accounts.py",
    ),
    "slug": (
        _SLUGS.format(_PLAIN),
        _SLUGS.format("title"),
        _SLUGS.format("title.lower()"),
        _SLUGS.format("title.upper()"),
    ),
}


def rows(num: int, seed: int, file: str) -> list[dict[str, Any]]:
    """Returns rows in turn of each repository; those of "sft" with a command by chance."""
    draw, names = random.Random(f"repositories {seed} {file}"), sorted(COMMANDS)
    found = []
    for number in range(num):
        name = names[number % len(names)]
        answer = f"```bash\nsed -i {draw.choice(COMMANDS[name])}\n```"
        row = {"prompt": f"{name}\n", "answer": answer if file == "sft" else ""}
        found.append(row | {"extra": {"task": str(TASKS / name)}})
    return found
