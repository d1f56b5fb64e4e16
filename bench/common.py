"""What benches share: commit, date and machine; the table in bench/results and the JSON beside it;
and how they run megagrpo."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def provenance() -> dict:
    """Commit (with a mark when the tree differs from it), date, and the machine in words."""

    def git(*args: str) -> str:
        if shutil.which("git") is None:  # a container, perhaps
            return ""
        return subprocess.run(
            ["git", *args], cwd=RESULTS.parent, capture_output=True, text=True
        ).stdout.strip()

    changed = " + changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    machine = (
        f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"
    )
    commit = (git("rev-parse", "--short", "HEAD") or "unknown") + changed
    return {"commit": commit, "date": datetime.now(UTC).date().isoformat(), "machine": machine}


def write_results(
    name: str,
    data: dict,
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    folder: Path = RESULTS,
) -> None:
    """Writes the table into bench/results/NAME.md, and all of `data` into NAME.json beside it; prints
    the table.

    Git ignores the JSON: it stays on the machine that measured.
    """
    table = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    origin = f"commit {data['commit']}, {data['date']}, {data['machine']}"
    (folder / f"{name}.md").write_text("\n".join([*table, "", origin, ""]))
    print("\n".join(table))


def write_config(name: str, target: Path, replace: dict[str, str]) -> None:
    """Writes a shipped experiment to `target` with texts replaced, such as its folders."""
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    for old, new in replace.items():
        text = text.replace(old, new)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def quickstart_under(preset: str, folder: Path, start: Path) -> str:
    """The quickstart experiment whose algorithm section is a preset, as YAML. folder: of the run;
    start: with model and data."""
    text = (ROOT / "configs" / "quickstart.yaml").read_text()
    text, found = re.subn(r"(?m)^algorithm:\n(?: .*\n)+", f"preset: {preset}\n", text)
    assert found == 1, "quickstart.yaml has one algorithm section"
    if preset == "gdpo":  # of several graders: a second one for answers that are numbers
        graders = '[{grader: exact}, {grader: format, args: {pattern: "[0-9]+"}}]'
        text = text.replace("grader: exact,", f"graders: {graders},")
    return text.replace("output_dir: runs/quickstart", f"output_dir: {folder}").replace(
        "runs/quickstart", str(start)
    )


def prepare(config: Path, recipe: str | Path, overrides: Sequence[str]) -> None:
    """Makes the experiment's model and data. recipe: a file, or the name of one in
    examples/laptop."""
    file = recipe if isinstance(recipe, Path) else ROOT / "examples" / "laptop" / f"{recipe}.yaml"
    words = [
        *("--recipe", str(file)),
        *(part for override in overrides for part in ("--set", override)),
    ]
    script = ROOT / "examples" / "laptop" / "prepare.py"
    subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(config), *words], check=True, cwd=ROOT
    )


def call_megagrpo(command: str, config: Path, overrides: Sequence[str], *words: str) -> None:
    """Runs `megagrpo COMMAND CONFIG WORDS --set OVERRIDE ...`; raises CalledProcessError when it
    fails."""
    settings = [part for override in overrides for part in ("--set", override)]
    print(f"== megagrpo {command} {config.name} {' '.join(overrides)}", flush=True)
    subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "megagrpo.cli",
            command,
            str(config),
            *words,
            *settings,
        ],
        check=True,
        cwd=ROOT,
    )
