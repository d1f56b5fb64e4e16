"""The command line of `megagrpo plan-weights`."""

import argparse
from collections.abc import Mapping
from dataclasses import replace

from megagrpo.check.hardware import Rates, hardware_of
from megagrpo.config.schema import ExperimentConfig
from megagrpo.system.arguments import numbers
from megagrpo.tools.plan.command import add_cluster_options

_RATES = ("between_gb_s", "inside_gb_s", "efficiency", "message_us", "call_ms")


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    option = command.add_argument
    engines = "numbers of engines to plan for; default: rollout.num_engines"
    option("--engines", type=numbers, metavar="8,16,32", help=engines)
    option(
        "--changed",
        type=float,
        metavar="0.01",
        help="share of the elements that a step changes, for weights.delta",
    )
    option(
        "--between-gb-s", type=float, help="GB/s of one rank between nodes, instead of the table's"
    )
    option("--inside-gb-s", type=float, help="GB/s of one rank inside a node")
    option("--efficiency", type=float, help="share of these rates that transfers reach")
    option("--message-us", type=float, help="microseconds that a rank needs for a message")
    option("--call-ms", type=float, help="milliseconds of an HTTP call to an engine")
    add_cluster_options(command)


def run(args: argparse.Namespace, config: ExperimentConfig) -> int:
    """Runs the command."""
    from megagrpo.tools.plan.publish_bytes import plan_weights  # imports torch

    hardware = args.hardware or config.cluster.gpu
    rates = rates_of(hardware, {name: getattr(args, name) for name in _RATES})
    engines = args.engines or [config.rollout.num_engines]
    print(plan_weights(config, engines, rates, args.gpus_per_node, args.json, args.changed))
    return 0


def rates_of(name: str, changes: Mapping[str, float | None]) -> Rates:
    """Returns the links of a row of HARDWARE, replaced by the values of `changes` that are not
    None."""
    given = {key: value for key, value in changes.items() if value is not None}
    for key, value in given.items():
        if value < 0 or (value == 0 and key not in ("message_us", "call_ms")):
            raise ValueError(f"--{key.replace('_', '-')} {value:g} must be positive")
    return replace(hardware_of(name).rates, **given)
