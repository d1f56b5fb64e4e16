"""verl's and ROLL's own examples through `megagrpo convert`, and each result through the checks
before a start.

    python bench/convert_examples.py --verl VERL/examples --roll ROLL/examples [--out bench/results]

VERL and ROLL are checkouts, which this project does not contain. Of verl: every script that starts
main_ppo, but for those of PPO (a critic) and of images (their models are refused); of ROLL: every
RLVR experiment on text. A converted experiment is checked on the description of its model where
configs/models has one of the same name, and on two rows of data as the framework writes them;
missing files and packages count as no problem.
"""

import argparse
import json
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
from megagrpo.check.fitting import fit_problems
from megagrpo.check.problems import preflight
from megagrpo.cluster.submit import Request, submit
from megagrpo.config.load import ConfigError, load_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.tools.convert.command import translate
from megagrpo.tools.convert.foreign import FRAMEWORKS
from megagrpo.tools.convert.translation import Translation

STATUSES = ("translated", "as here", "not translated", "unknown")
USER = [{"role": "user", "content": "What is 1 + 1?"}]


def scripts(framework: str, folder: Path) -> list[Path]:
    """The examples of a checkout."""
    if framework == "verl":
        found = [
            path
            for path in sorted(folder.rglob("*.sh"))
            if re.search("main_ppo|main_dapo", path.read_text())
        ]
        return [
            path
            for path in found
            if not re.search(
                r"ppo_trainer/|split_placement|_vl[-_]|glm41v|minicpmo|geo3k", str(path)
            )
        ]
    found = [
        path
        for path in sorted(folder.rglob("*.yaml"))
        if re.search("rlvr|docs_examples", str(path))
    ]
    return [path for path in found if not re.search(r"-vl-|agentic|omni|vl_", str(path))]


def write_rows(folder: Path, sources: list[str]) -> tuple[Path, Path]:
    """Two rows as verl's data_preprocess and as ROLL write them."""
    source = (sources or ["openai/gsm8k"])[0]
    row = {
        "data_source": source,
        "prompt": USER,
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"index": 0},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 2), folder / "verl.parquet")
    line = json.dumps(
        {"messages": json.dumps(USER), "prompt": "1 + 1", "ground_truth": "2", "tag": source}
    )
    (folder / "roll.jsonl").write_text(f"{line}\n" * 2)
    return folder / "verl.parquet", folder / "roll.jsonl"


def check_problems(draft: Translation, framework: str, folder: Path) -> list[str]:
    """What loading and the checks before a start say of the converted file."""
    (folder / "mine.yaml").write_text(draft.yaml("converted"))
    graders = draft.values.get("data.grader_by_source")
    data = write_rows(folder, list(graders) if isinstance(graders, dict) else [])[
        framework == "roll"
    ]
    model = ROOT / "configs" / "models" / str(draft.values.get("model.path")).rpartition("/")[2]
    known = [f"model.path={json.dumps(str(model))}"] if model.is_dir() else []
    files = [
        f"{key}={json.dumps(str(data))}"
        for key in ("data.path", "eval.data.path")
        if key in draft.values
    ]
    try:
        config = load_config(folder / "mine.yaml", [*known, *files])
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
    for framework in ("verl", "roll"):
        parser.add_argument(f"--{framework}", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    files, lines, reasons = [], [], Counter()
    for framework in ("verl", "roll"):
        root, total, whole, sound = getattr(args, framework), Counter(), 0, 0
        found = scripts(framework, root)
        for path in found:
            draft = translate(framework, path)
            counts = Counter(each.status for each in draft.outcomes())
            with tempfile.TemporaryDirectory() as folder:
                problems = draft.problems or check_problems(draft, framework, Path(folder))
            lost = {each.key: each.text for each in draft.outcomes() if each.status in STATUSES[2:]}
            reasons.update(
                (FRAMEWORKS[framework], re.sub(r"\d+", "N", text)) for text in set(lost.values())
            )
            files.append(
                {"file": str(path.relative_to(root)), **counts, "lost": lost, "problems": problems}
            )
            total.update(counts)
            whole += not lost
            sound += not problems
        cells = [str(total[status]) for status in STATUSES]
        lines.append([FRAMEWORKS[framework], str(len(found)), *cells, str(whole), str(sound)])
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
