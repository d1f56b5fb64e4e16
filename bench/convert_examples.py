"""Other frameworks' own examples through `megagrpo convert`, and each result through the checks
before a start.

    python bench/convert_examples.py --verl VERL/examples --slime SLIME --miles MILES [--out bench/results]

Each is a checkout, which this project does not contain. Of verl: every script that starts main_ppo,
but for those of PPO (a critic) and of images (their models are refused); of slime and miles: every
script that starts train.py. A converted experiment is checked on the description of its model where
configs/models has one of the same name, and on two rows of data as the framework writes them;
missing files and packages count as no problem.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pyarrow
import pyarrow.parquet

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.common import RESULTS, ROOT, provenance, write_results
from megagrpo.check.problems import preflight
from megagrpo.check.rules.table import broken_as_read
from megagrpo.config.load import ConfigError, load_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.tools.convert.command import translate
from megagrpo.tools.convert.foreign import FRAMEWORKS
from megagrpo.tools.convert.translation import Translation
from megagrpo.tools.job_request import Request
from megagrpo.tools.plan.fitting import fit_problems
from megagrpo.tools.submit import submit

STATUSES = ("translated", "as here", "not translated", "unknown")
USER = [{"role": "user", "content": "What is 1 + 1?"}]


VARIABLES = {  # which scripts of slime's and miles' want to be set
    "BASE_DIR": "/data",
    "BASE_FOLDER": "/data",
    "MASTER_ADDR": "10.0.0.1",
    "WANDB_KEY": "key",
    "WANDB_API_KEY": "key",
}
_SCRIPTS = {  # what is in the text, what is not in the path
    "verl": (
        "main_ppo|main_dapo",
        r"ppo_trainer/|split_placement|_vl[-_]|glm41v|minicpmo|geo3k",
    ),
    "slime": (r"train(_async)?\.py", r"/tests/|/docs/|/docker/|^tests/"),
    "miles": (r"train(_async)?\.py", r"/tests/|/docs/|/docker/|^tests/|\.claude"),
}


def scripts(framework: str, folder: Path) -> list[Path]:
    """The examples of a checkout."""
    text, left_out = _SCRIPTS[framework]
    return [
        path
        for path in sorted(folder.rglob("*.sh"))
        if not re.search(left_out, str(path.relative_to(folder.parent)))
        and re.search(text, path.read_text(encoding="utf-8", errors="replace"))
    ]


def write_rows(draft: Translation, framework: str, folder: Path) -> Path:
    """Two rows as verl's data_preprocess, or with the columns that the file names."""
    graders = draft.values.get("data.grader_by_source")
    source = next(iter(graders)) if isinstance(graders, dict) and graders else "openai/gsm8k"
    if framework == "verl":
        row = {
            "data_source": source,
            "prompt": USER,
            "reward_model": {"ground_truth": "2"},
            "extra_info": {"index": 0},
        }
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 2), folder / "verl.parquet")
        return folder / "verl.parquet"
    row = {}
    for section in ("data", "eval.data"):
        chat = draft.values.get("data.chat_template")
        prompt = draft.values.get(f"{section}.prompt_key", "prompt")
        row[str(prompt)] = USER if chat else "1 + 1"
        row[str(draft.values.get(f"{section}.answer_key", "answer"))] = "2"
    row |= {str(draft.values[key]): [] for key in ("data.tools_key",) if key in draft.values}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    return folder / "rows.jsonl"


def check_problems(draft: Translation, framework: str, folder: Path) -> list[str]:
    """What loading and the checks before a start say of the converted file."""
    (folder / "mine.yaml").write_text(draft.yaml("converted"))
    data = json.dumps(str(write_rows(draft, framework, folder)))
    name = str(draft.values.get("model.path")).rstrip("/").rpartition("/")[2]
    model = ROOT / "configs" / "models" / name
    known = [f"model.path={json.dumps(str(model))}"] if model.is_dir() else []
    files = [f"{key}={data}" for key in ("data.path", "eval.data.path") if key in draft.values]
    if "eval.data.sources" in draft.values:
        files.append(f"eval.data.sources=[{{source: one, path: {data}}}]")
    try:
        config = load_config(folder / "mine.yaml", [*known, *files], judge=broken_as_read)
    except ConfigError as exc:
        return str(exc).splitlines()[1:]
    found = preflight(config) + fit_problems(config)
    assert sorted(found) == sorted(submit_problems(config)), (
        "check and submit --dry-run say the same"
    )
    missing = ("does not exist", "not installed", "FileNotFoundError")  # code of theirs, too
    return [problem for problem in found if not any(part in problem for part in missing)]


def submit_problems(config: ExperimentConfig) -> list[str]:
    """What `megagrpo submit --dry-run` refuses."""
    try:
        with redirect_stdout(StringIO()):
            submit(config, [], Request(), dry_run=True)
    except ValueError as exc:
        return [line.strip() for line in str(exc).split("\n  ")[1:]]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for framework in _SCRIPTS:
        parser.add_argument(f"--{framework}", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.environ |= VARIABLES
    files, lines, reasons = [], [], Counter()
    for framework in _SCRIPTS:
        root = getattr(args, framework)
        if root is None:
            continue
        found, total, whole, sound = 0, Counter(), 0, 0
        for path in scripts(framework, root):
            file = str(path.relative_to(root))
            try:
                draft = translate(framework, path)
            except ValueError as exc:
                reason = str(exc).removeprefix(f"{path}: ")
                files.append({"framework": framework, "file": file, "not_read": reason})
                continue
            found += 1
            counts = Counter(each.status for each in draft.outcomes())
            with tempfile.TemporaryDirectory() as folder:
                problems = draft.problems or check_problems(draft, framework, Path(folder))
                problems = [problem.replace(folder, "") for problem in problems]
            lost = {each.key: each.text for each in draft.outcomes() if each.status in STATUSES[2:]}
            reasons.update(
                (FRAMEWORKS[framework], re.sub(r"\d+", "N", text)) for text in set(lost.values())
            )
            files.append(
                {"framework": framework, "file": file, **counts, "lost": lost, "problems": problems}
            )
            total.update(counts)
            whole += not lost
            sound += not problems
        cells = [str(total[status]) for status in STATUSES]
        lines.append([FRAMEWORKS[framework], str(found), *cells, str(whole), str(sound)])
    header = [
        "examples of",
        "files",
        *(f"keys {status}" for status in STATUSES),
        "files without a loss",
        "files that check",
    ]
    most = [
        {"framework": name, "reason": text, "files": number}
        for (name, text), number in reasons.most_common()
    ]
    write_results(
        "convert_examples",
        {**provenance(), "reasons": most, "files": files},
        header,
        lines,
        args.out,
    )
    for reason in most[:15]:
        print(reason["files"], reason["framework"], reason["reason"])


if __name__ == "__main__":
    main()
