"""Words of SGLang's command line for settings by field of its ServerArgs. Imports SGLang: for an
engine's process and dry runs."""

import argparse
import json
from collections.abc import Iterator, Mapping

from sglang.srt.server_args import ServerArgs

from megagrpo.config.fields import complaints
from megagrpo.config.libraries import UNTRIED
from megagrpo.system.user_function import did_you_mean


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ValueError(message)


def engine_words(settings: Mapping[str, object]) -> list[str]:
    """Returns the command line that sets these fields."""
    options = _options(_parser())
    return [word for name, value in settings.items() for word in _words(options[name], value)]


def server_problems(settings: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yields (field, problem) for each setting that SGLang's parser does not take."""
    parser = _parser()
    options = _options(parser)
    for name, value in settings.items():
        field = name.removeprefix(UNTRIED)
        if field not in options:
            yield name, f"SGLang's ServerArgs has no such option{did_you_mean(field, options)}"
            continue
        for text in complaints(_parse, parser, options[field], value):
            yield name, f"SGLang's ServerArgs refuses it: {text}"


def _parse(parser: _Parser, action: argparse.Action, value: object) -> None:
    parser.parse_args(["--model-path", "m", *_words(action, value)])


def _parser() -> _Parser:
    parser = _Parser()
    ServerArgs.add_cli_args(parser)
    return parser


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Returns field -> its first option; a deprecated spelling comes later."""
    options: dict[str, argparse.Action] = {}
    for action in parser._actions:
        if action.option_strings and action.dest in ServerArgs.__struct_fields__:
            options.setdefault(action.dest, action)
    return options


def _words(action: argparse.Action, value: object) -> list[str]:
    option = action.option_strings[0]
    if value is None or isinstance(value, bool) != (action.nargs == 0):
        raise ValueError(f"{json.dumps(value)} has no word on its command line ({option})")
    if action.nargs == 0:
        return [option] if value else [o for o in action.option_strings if o.startswith("--no-")]
    if isinstance(value, dict) or (isinstance(value, list) and action.nargs is None):
        return [option, json.dumps(value)]
    return [option, *map(str, value if isinstance(value, list) else [value])]
