"""The command line, `megagrpo COMMAND ...`. Heavy imports stay inside the commands that need
them."""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from megagrpo import __version__
from megagrpo.check.reading import read_for
from megagrpo.cluster.machine import run
from megagrpo.cluster.nodes import Node, run_node, serve_node, train_node
from megagrpo.config.schema import ExperimentConfig
from megagrpo.loop.ranks import train_main
from megagrpo.system.arguments import positive
from megagrpo.system.environment import under_torchrun
from megagrpo.system.processes import raise_file_limit
from megagrpo.system.user_function import did_you_mean

# Commands beside the core: module and text. A module has add_options(parser) and run(args, config),
# or run(args) if it reads no experiment.
_TOOLS = {
    "init": (
        "megagrpo.tools.init.command",
        "write an experiment for a model and a data file: columns, grader, layout, evaluation",
    ),
    "convert": (
        "megagrpo.tools.convert.command",
        "translate an experiment from verl, slime or miles",
    ),
    "sft": ("megagrpo.tools.ranks.sft", "supervised warm-up with the same actor"),
    "export": ("megagrpo.tools.ranks.export", "write a checkpoint as a Hugging Face model folder"),
    "replay": (
        "megagrpo.tools.ranks.replay",
        "repeat the update on a dumped batch, from a non-finite step or a step in log.dump_steps",
    ),
    "submit": (
        "megagrpo.tools.submit",
        "run the experiment as a Slurm job, or print it for Kubernetes or SkyPilot",
    ),
    "try": (
        "megagrpo.tools.trial",
        "sample a few rollouts without training, and print them with rewards and the tokens to learn",
    ),
    "evaluate": (
        "megagrpo.tools.evaluate",
        "evaluate the newest checkpoint, or the model, without training, on this machine",
    ),
    "certify": (
        "megagrpo.tools.certify.command",
        "verify on a tiny model of this architecture that no layout changes loss or gradients",
    ),
    "bisect": (
        "megagrpo.tools.bisect.command",
        "run the same tokens through an engine and the trainer, and name where they first differ",
    ),
    "check": ("megagrpo.tools.explain", "explain the experiment without starting anything"),
    "plan": (
        "megagrpo.tools.plan.command",
        "estimate memory for trainers and engines and a roofline per step, from the model's config.json",
    ),
    "doctor": (
        "megagrpo.tools.doctor",
        "check versions and name what is missing or clashes, with a remedy",
    ),
    "report": (
        "megagrpo.tools.report",
        "write a summary table and the learning curve of a run",
    ),
    "status": (
        "megagrpo.tools.status",
        "show how far a run is: steps, seconds per step, reward, engines",
    ),
    "stop": (
        "megagrpo.tools.stop",
        "save and end a run after the current step; Slurm does not requeue the job",
    ),
    "engines": (
        "megagrpo.tools.engines",
        "add an engine to a running service, or drain one",
    ),
    "view": (
        "megagrpo.tools.view.command",
        "write the samples of one or more runs as one HTML file",
    ),
}

_Commands = argparse._SubParsersAction
# of these, which read none
_WITHOUT_EXPERIMENT = ("init", "convert", "doctor", "report", "status", "stop", "engines", "view")
_HELP_WIDTH = 92
# Purpose, example and commands, in the order of `megagrpo --help`.
_GROUPS = {
    "run": (
        "megagrpo run mine.yaml --set train.num_steps=100",
        ("run", "submit", "stop", "evaluate", "sft", "export", "serve", "train", "engines"),
    ),
    "look": ("megagrpo status runs/mine", ("status", "report", "view", "try")),
    "plan": (
        "megagrpo init models/Qwen3-1.7B train.jsonl --gpus 8",
        ("init", "check", "plan", "convert", "doctor"),
    ),
    "verify": ("megagrpo certify mine.yaml --ranks 2", ("certify", "bisect", "replay")),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit status: 2, with one message, for an error that the user
    can correct."""
    words = sys.argv[1:] if argv is None else argv
    parser = _parser(words)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        command = _parsers(parser)[args.command]
        hint = did_you_mean(unknown[0], command._option_string_actions)
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    # a leader has a connection for each request in flight, and login shells allow 1024 files
    raise_file_limit()
    try:
        return args.run(args)
    except (ValueError, PermissionError) as exc:  # other exceptions keep their traceback
        print(f"megagrpo {args.command}: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def command_parsers() -> "dict[str, _Parser]":
    """Returns the parser of every command, for the reference in docs/."""
    return _parsers(_parser(list(_TOOLS)))


class _Parser(argparse.ArgumentParser):
    """A parser whose errors suggest the nearest word."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, and exits with 2."""
        wrong = re.search(r"invalid choice: '([^']*)'", message)
        commands = _parsers(self)
        hint = did_you_mean(wrong[1], commands) if wrong and commands else ""
        super().error(f"no command {wrong[1]!r}{hint}" if wrong and hint else message)


def _parsers(parser: argparse.ArgumentParser) -> "dict[str, _Parser]":
    """Returns the parsers of a parser's commands."""
    actions = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {name: command for action in actions for name, command in action.choices.items()}


def _add_with_config(
    commands: _Commands,
    name: str,
    run: Callable[[argparse.Namespace, ExperimentConfig], int],
    text: str,
) -> argparse.ArgumentParser:
    """Adds a command that reads an experiment; `text` is its help."""
    command = commands.add_parser(name, description=text)  # _help says it too
    command.set_defaults(run=lambda args: run(args, _load(args)))
    option = command.add_argument
    option("config", help="experiment YAML")
    option(
        "--set",
        action="append",
        default=[],
        metavar="a.b=c",
        dest="overrides",
        help="override one key",
    )
    return command


def _load(args: argparse.Namespace) -> ExperimentConfig:
    later = None
    if args.command == "check":
        later = import_module(_TOOLS["check"][0]).later_problems
    dry_run = getattr(args, "dry_run", False)
    return read_for(args.command, args.config, args.overrides, under_torchrun(), dry_run, later)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser of a command line, which imports only the tools that `words` name."""
    parser = _Parser(
        prog="megagrpo",
        description="GRPO with Megatron-Core actors and SGLang rollouts",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_training(commands)
    for name in _TOOLS:
        _add_tool(commands, name, imported=name in words)
    parser.epilog = _help(_parsers(parser))
    return parser


def _help(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Returns the commands by purpose, each group with an example."""
    width = max(map(len, commands))
    lines: list[str] = []
    for group, (example, names) in _GROUPS.items():
        lines.append(f"{group}: {example}")
        for name in names:
            said = textwrap.wrap(str(commands[name].description), _HELP_WIDTH - width)
            lines.append(f"  {name:<{width}}  {said[0]}")
            lines += [f"  {'':<{width}}  {line}" for line in said[1:]]
    return "\n".join([*lines, "", "Run `megagrpo COMMAND --help` for the options of a command."])


def _add_tool(commands: _Commands, name: str, imported: bool) -> None:
    module, text = _TOOLS[name]

    def run(*args: object) -> int:
        return import_module(module).run(*args)

    if name in _WITHOUT_EXPERIMENT:
        command = commands.add_parser(name, description=text)
        command.set_defaults(run=run)
    else:
        command = _add_with_config(commands, name, run, text)
    if imported:
        import_module(module).add_options(command)


def _add_training(commands: _Commands) -> None:
    text = (
        "serve and train on this machine, and clean up; with "
        "--master-addr, run this node's part of a colocated run"
    )
    _add_node(_add_with_config(commands, "run", _run, text), "", 30000)
    text = "start and supervise the rollout service; with --master-addr, this node's part of it"
    serve = _add_with_config(commands, "serve", _serve, text)
    serve.add_argument("--ray-address", help="join this Ray cluster")
    _add_node(serve, "rollout ", 30000)
    text = "start this node's trainer ranks for a running service (under torchrun: one rank)"
    train = _add_with_config(commands, "train", _train, text)
    train.add_argument("--service", help="URL of the service; default: from the run folder")
    _add_node(train, "trainer ", 29500)


def _add_node(command: argparse.ArgumentParser, kind: str, port: int) -> None:
    option = command.add_argument
    option("--nnodes", type=positive, default=1, help=f"number of {kind}nodes (default 1)")
    option("--node-rank", type=int, default=0, help="this node's number, from 0")
    option("--master-addr", help="address of node 0")
    meeting = f"port of node 0 on which the nodes meet (default {port})"
    option("--master-port", type=int, default=port, help=meeting)
    option("--node-addr", help="this node's address; default: that of its interface towards node 0")


def _node(args: argparse.Namespace) -> Node:
    return Node(args.node_rank, args.nnodes, args.node_addr, args.master_addr, args.master_port)


def _run(args: argparse.Namespace, config: ExperimentConfig) -> int:
    node = _node(args)
    return run(config) if node.first_address is None else run_node(config, node)


def _serve(args: argparse.Namespace, config: ExperimentConfig) -> int:
    return serve_node(config, _node(args), args.ray_address)


def _train(args: argparse.Namespace, config: ExperimentConfig) -> int:
    if under_torchrun():
        return train_main(config, args.service)
    words = ["--service", args.service] if args.service else []
    return train_node(config, words, _node(args))


if __name__ == "__main__":
    sys.exit(main())
