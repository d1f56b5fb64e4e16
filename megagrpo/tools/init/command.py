"""`megagrpo init MODEL DATA`: writes an experiment that `check` accepts and `run` starts."""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

import yaml

from megagrpo.check.problems import describe_model, layout_problems
from megagrpo.check.rules.table import broken_as_read
from megagrpo.config.actor import ActorConfig
from megagrpo.config.load import Dumper, Plain, load_config, plain_yaml
from megagrpo.data.hub import with_local_files
from megagrpo.models.table import architecture_of, parameter_counts
from megagrpo.system.arguments import positive
from megagrpo.system.environment import visible_gpus
from megagrpo.system.progress import Progress
from megagrpo.system.run_folder import write_whole
from megagrpo.tools.check.loading import try_loading
from megagrpo.tools.explain import known_problems
from megagrpo.tools.init.experiment import Draft, draft_experiment
from megagrpo.tools.plan.command import TIGHT
from megagrpo.tools.plan.fitting import with_model
from megagrpo.tools.plan.hardware import usable_bytes
from megagrpo.tools.plan.roofline import target_of
from megagrpo.tools.plan.search import best_layouts, changes
from megagrpo.tools.view.texts import printable

_START_S = 1800.0  # for engines that load a large model and capture graphs
_WIDTH = 90
_ORDER = ("name", "output_dir", "seed", "preset", "model", "data", "sampling", "reward", "train")


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    option = command.add_argument
    option("model", help="folder, or name on the Hugging Face Hub")
    option("data", help="file with prompts and answers, or a dataset on the Hub")
    option("--gpus", type=int, help="GPUs per node; 0: a CPU; default: the GPUs of this machine")
    option("--nodes", type=positive, default=1, help="number of nodes (default 1)")
    option("--hardware", default="H100", help="H100 (default), H200, H20, B200")
    option("--prompt-key", metavar="COLUMN", help="default: guessed from column names")
    option("--answer-key", metavar="COLUMN", help="default: guessed from column names")
    option("--eval", metavar="FILE", help="held-out rows; default: a file beside, or the last rows")
    option("--grader", metavar="NAME", help="of both files; default: the one that answers propose")
    option(
        "-o",
        "--output",
        type=Path,
        default=Path("mine.yaml"),
        help="file to write (default mine.yaml)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 1 if `check` finds problems in what it wrote."""
    output: Path = args.output
    draft = Draft(
        output,
        {
            "name": output.stem,
            "output_dir": f"runs/{output.stem}",
            "seed": 0,
            "model": {"path": args.model},
            "data": {"path": args.data},
        },
    )
    draft.beside("{}" + output.suffix)
    gpus = len(visible_gpus()) if args.gpus is None else args.gpus
    with ExitStack() as undo, Progress(f"init {output}", stream=sys.stderr) as progress:
        undo.callback(draft.remove)
        progress.enter("reads model and data")
        draft_experiment(
            draft, not gpus, (args.prompt_key, args.answer_key), args.grader, args.eval
        )
        if gpus:
            progress.enter(f"searches layouts of {args.nodes} node(s) of {gpus} {args.hardware}")
            _lay_out(draft, args.nodes, gpus, args.hardware)
        else:
            draft.add("rollout", {"num_engines": 1}, "for GPUs: megagrpo init ... --gpus 8")
        write_whole(output, _text(draft))
        progress.enter("checks it")
        config, _ = with_local_files(load_config(output, judge=broken_as_read), weights="")
        problems = known_problems(config, try_loading(config))
        undo.pop_all()
    print(output.read_text(encoding="utf-8"))
    print("\n".join(problems) or f"no problems found; `megagrpo check {output}` explains it")
    if problems:
        print(f"next: mend what is named, then megagrpo check {output}")
        return 1
    print(f"next: megagrpo try {output}; megagrpo run {output}")
    return 0


def _lay_out(draft: Draft, nodes: int, gpus: int, hardware: str) -> None:
    """Adds the layout with the best bound of a step. Raises ValueError if none fits."""
    draft.add("cluster", {"gpus_per_node": gpus, "gpu": hardware})
    draft.add("actor", {"deadline_s": 4 * _START_S})
    replay: dict[str, Plain] = {"routing_replay": "rollout"}
    arch = architecture_of(describe_model(draft.config()))
    if not layout_problems(arch, ActorConfig.model_validate(replay)):
        draft.add("actor", replay)
    draft.add("rollout", {"start_timeout_s": _START_S})
    draft.add("weights", {"timeout_s": 2 * _START_S})
    config = with_model(draft.config())
    target = target_of(config)
    room = usable_bytes(target.hardware)
    fullest = [
        (plan, max(rank.total for rank in plan.phases.values()))
        for plan in best_layouts(config, target, nodes)
    ]
    best, most = next((pair for pair in fullest if pair[1] <= TIGHT * room), fullest[0])
    for word in changes(config, best.config):
        keys, _, value = word.partition("=")
        *around, key = keys.split(".")
        draft.keys(*around)[key] = plain_yaml(value, word)
    search = f"`megagrpo plan {draft.file} --search {nodes}`"
    draft.comments["actor"] = [
        f"the layout is of {search}: a step takes at least {best.step:.3g} s,",
        f"the fullest GPU holds {most / 1e9:.0f} of {room / 1e9:.0f} GB",
    ]


def _text(draft: Draft) -> str:
    """Returns the experiment as YAML, each section below its comments."""
    hf = describe_model(draft.config())
    size = parameter_counts(architecture_of(hf)).total
    blocks = [
        f"# {printable(str(draft.keys('model')['path']))}: {hf['model_type']}, {size / 1e9:.3g} B parameters. "
        "Written by `megagrpo init`;\n# every key is in docs/reference/configuration.md."
    ]
    names = [name for name in _ORDER if name in draft.sections]
    names += [name for name in draft.sections if name not in _ORDER]
    for name in names:
        block = _section(name, draft.sections[name])
        comments = "".join(f"# {printable(text)}\n" for text in draft.comments.get(name, ()))
        short = name in _ORDER[:4] and not comments
        blocks.append((comments + block).rstrip() + ("" if short else "\n"))
    return "\n".join(blocks)


def _section(name: str, value: Plain) -> str:
    """Returns a section in one line if it fits, else with a key a line."""
    line = f"{name}: {_yaml(value, one_line=True)}" if isinstance(value, dict) else ""
    return line if 0 < len(line) < _WIDTH else _yaml({name: value}, one_line=False)


def _yaml(value: Plain, one_line: bool) -> str:
    return yaml.dump(
        value,
        Dumper=Dumper,
        sort_keys=False,
        width=1000,
        allow_unicode=True,
        default_flow_style=one_line,
    )
