"""Tries bug reports of other trainers' users, and relatives of each, on this tree; or measures
`megagrpo check` on a large file.

The cases are those of tests/unit/report_cases.py, which tests/unit/test_reports.py holds.

    python bench/reports.py                  # a minute; writes bench/results/reports.md
    python bench/reports.py --rows 100000    # a minute; writes bench/results/check_rows.md
"""

import argparse
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import provenance, write_results

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.config.data import DataConfig
from megagrpo.data.rows import fingerprint, read_rows
from tests.unit.report_cases import REPORTS

HEADER = ("report", "before", "case", "expected", "got", "")
WORDS = re.findall(
    r"\w+", "a train leaves the town at noon how many apples has she if he gives one of them"
)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def cell(value: object) -> str:
    return "`" + repr(value).replace("|", "\\|").replace("`", "'") + "`"


def try_reports() -> None:
    lines = []
    for report, (before, cases) in REPORTS.items():
        of_report = (report, before)
        for what, expected, found in cases:
            got = found()
            verdict = "" if got == expected else "**differs**"
            name = what.replace("|", "\\|").replace("\n", " ")
            lines.append([*of_report, name, cell(expected), cell(got), verdict])
            of_report = ("", "")
    write_results("reports", provenance() | {"cases": lines}, HEADER, lines)
    if wrong := [line for line in lines if line[-1]]:
        raise SystemExit(f"{len(wrong)} cases differ")


def experiment(folder: Path, rows: int) -> Path:
    """Returns an experiment with so many questions of about 60 words and a tokenizer of bytes."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    chosen = random.Random(0)
    questions = [
        " ".join(chosen.choice([*WORDS, str(chosen.randint(1, 99))]) for _ in range(60))
        for _ in range(rows)
    ]
    lines = [json.dumps({"prompt": text, "answer": "7"}) for text in questions]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    make_tiny_model(
        TinyModelConfig(path=str(folder / "model"), family="llama", num_layers=1), seed=0
    )
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(questions[:1000], vocab_size=1000, special_tokens=["<|end|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|end|>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder / "model")
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 1024}))
    data = {"path": str(folder / "rows.jsonl"), "chat_template": True}
    sections = {"name": "rows", "output_dir": str(folder / "run"), "data": data}
    sections["model"] = {"path": str(folder / "model")}
    (folder / "rows.yaml").write_text(json.dumps(sections))  # also YAML
    return folder / "rows.yaml"


def measure(rows: int) -> None:
    lines = []
    for number in (1000, rows):
        with tempfile.TemporaryDirectory() as name:
            config = experiment(Path(name), number)
            of_all = resource.getrusage(resource.RUSAGE_CHILDREN)
            before = of_all.ru_utime + of_all.ru_stime
            start = time.perf_counter()
            command = [sys.executable, "-W", "ignore", "-m", "megagrpo.cli", "check", str(config)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seconds = time.perf_counter() - start
            of_all = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = of_all.ru_utime + of_all.ru_stime - before
            assert f"{number:,} rows" in said and "no problems found" in said, said
            found = read_rows(DataConfig(path=str(Path(name) / "rows.jsonl"), chat_template=True))
            start = time.perf_counter()
            fingerprint(found)
            digest = time.perf_counter() - start
            lines.append([f"{number:,}", f"{seconds:.1f}", f"{cpu:.1f}", f"{digest:.2f}"])
    header = ("rows of about 60 words", "`megagrpo check`, s", "CPU, s", "their fingerprint, s")
    write_results("check_rows", provenance() | {"lines": lines}, header, lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=0)
    rows = parser.parse_args().rows
    measure(rows) if rows else try_reports()
