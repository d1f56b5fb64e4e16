"""Makes the model and the problems of a laptop experiment; `megagrpo sft` and `megagrpo run` come
next.

    python examples/laptop/prepare.py configs/quickstart.yaml [--recipe FILE] [--set
    section.key=value ...]

The recipe of configs/NAME.yaml is examples/laptop/NAME.yaml. Seed and paths come from the
experiment, with --set as in `megagrpo`.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.laptop.datasets import make_dataset
from examples.laptop.model import make_tiny_model
from examples.laptop.pretrained import make_pretrained_model
from examples.laptop.recipe import load_recipe, recipe_of
from megagrpo.config.load import load_config


def prepare(experiment: Path, recipe_file: Path, overrides: list[str]) -> None:
    """Makes every part of the recipe and prints a line for each. Raises ValueError if a part cannot
    be made."""
    config = load_config(experiment, overrides)
    recipe = load_recipe(recipe_file, config)
    if recipe.dataset is not None:
        for name, count in make_dataset(recipe.dataset, config.seed).items():
            print(f"{recipe.dataset.folder}: {name} {count}")
    if recipe.model is not None:
        size = make_tiny_model(recipe.model, config.seed)
        print(f"{recipe.model.path}: {recipe.model.family}, {size:,} parameters")
    if recipe.pretrained is not None:
        size = make_pretrained_model(recipe.pretrained)
        print(f"{recipe.pretrained.path}: from {recipe.pretrained.package}, {size:,} parameters")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", type=Path)
    parser.add_argument(
        "--recipe", type=Path, help="default: the file of the experiment's name in examples/laptop"
    )
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    args = parser.parse_args()
    recipe = args.recipe or recipe_of(args.experiment)
    if not recipe.is_file():
        parser.error(
            f"{recipe}: no such recipe; {args.experiment} needs a model and data of its own"
        )
    try:
        prepare(args.experiment, recipe, args.overrides)
    except ValueError as exc:
        print(f"prepare: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
