"""`megagrpo convert`: reads theirs, translates, checks that the result is an experiment, and writes
it."""

import argparse
import sys
from collections import Counter
from pathlib import Path

from pydantic import ValidationError

from megagrpo.check.rules.table import broken_as_read
from megagrpo.config.schema import ExperimentConfig
from megagrpo.config.wording import by_path, dotted, in_words
from megagrpo.system.run_folder import write_whole
from megagrpo.tools.convert import rules, slime, verl
from megagrpo.tools.convert.foreign import FRAMEWORKS
from megagrpo.tools.convert.reading import Source, read_source
from megagrpo.tools.convert.translation import Translation

_FUNCTIONS = {"verl": verl, "slime": slime, "miles": slime}


def translate(framework: str, path: Path) -> Translation:
    """Returns the draft of an experiment. Raises ValueError if the source cannot be read."""
    return draft_of(framework, read_source(framework, path))


def draft_of(framework: str, source: Source) -> Translation:
    """Returns the draft of an experiment from what was read."""
    draft = Translation(framework, source.given, source.notes)
    draft.apply(vars(rules) | vars(_FUNCTIONS[framework]))
    nested = draft.nested()
    try:
        refused = broken_as_read(ExperimentConfig.model_validate(nested))
    except ValidationError as exc:
        refused = in_words(by_path(exc, nested), nested)
    for keys, text in refused:
        draft.refuse(dotted(keys), text)
    return draft


def convert(draft: Translation, source: Path, output: Path | None, partial: bool) -> int:
    """Writes the experiment and returns 0; 1, and nothing is written, if something is lost and
    `partial` is false."""
    outcomes = draft.outcomes()
    lost = [each for each in outcomes if each.status in ("not translated", "unknown")]
    counts = Counter(each.status for each in outcomes)
    numbers = ", ".join(f"{number} {status}" for status, number in counts.items())
    problems = [f"the experiment as translated: {problem}" for problem in draft.problems]
    told = [
        *draft.notes,
        *draft.remarks,
        *(f"{each.shown}: {each.status}: {each.text}" for each in lost),
        *problems,
    ]
    head = f"{source}: {len(draft.given)} keys of {draft.shown}: {numbers}"
    print(head, *(f"  {line}" for line in told), sep="\n", file=sys.stderr)
    if (lost or problems) and not partial:
        rest = "--partial writes what could be translated, with comments on the rest"
        print(f"nothing was written; {rest}", file=sys.stderr)
        return 1
    command = f"`megagrpo convert {draft.framework}`"
    text = draft.yaml(f"Converted from {source.name} by {command}; see docs/reference/names.md.")
    if output is None:
        print(text, end="")
    else:
        write_whole(output, text)
    return 0


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    option = command.add_argument
    option("framework", choices=tuple(FRAMEWORKS), help="of ROLL and TRL only names are known")
    source = "shell script with the command (verl, slime, miles) or YAML (verl)"
    option("source", type=Path, help=source)
    output = "experiment to write; default: standard output"
    option("-o", "--output", type=Path, metavar="FILE", help=output)
    option("--overwrite", action="store_true", help="replace an existing file")
    option("--partial", action="store_true", help="write the experiment even if keys are lost")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.output is not None and args.output.exists() and not args.overwrite:
        raise ValueError(f"{args.output} exists: name another file, or say --overwrite")
    draft = translate(args.framework, args.source)
    return convert(draft, args.source, args.output, args.partial)
