"""The command line of `megagrpo plan`."""

import argparse
import sys
from pathlib import Path

from megagrpo.config.schema import ExperimentConfig
from megagrpo.system.arguments import positive
from megagrpo.system.progress import Progress


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    option = command.add_argument
    option("--lengths", help="of responses in tokens: their mean, or a file with one number a line")
    option(
        "--turns",
        help="of agents, means: count=20 tool_s=3 said=0.6 found=0.85 (found in prefix caches)",
    )
    option(
        "--measured", type=Path, metavar="RUN", help="a run folder whose seconds scale the roofline"
    )
    option(
        "--search",
        type=positive,
        metavar="NODES",
        help="also layouts of as many nodes by their bound",
    )
    option("--gpus-per-node", type=positive, help="of every node; default: cluster.gpus_per_node")
    option("--hardware", help="H100, H200, H20, B200; default: cluster.gpu")
    option("--json", type=Path, metavar="FILE", help="also write all figures")


def run(args: argparse.Namespace, config: ExperimentConfig) -> int:
    """Runs the command; returns 1 if the experiment does not fit."""
    names = ("hardware", "gpus_per_node", "lengths", "turns", "measured", "search", "json")
    with Progress(f"plan {config.name}", stream=sys.stderr) as progress:
        progress.enter("imports the planner")
        from megagrpo.tools.plan.search import Options, plan_command

        options = Options(**{name: getattr(args, name) for name in names})
        text, fits = plan_command(config, options, progress)
    print(text)
    return 0 if fits else 1
