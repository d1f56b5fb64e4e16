"""Reads what a user of verl, ROLL or TRL brings into one flat mapping: dotted key -> value."""

import os
import re
import subprocess
from pathlib import Path
from typing import cast

from megagrpo.config.load import Plain, plain_yaml
from megagrpo.tools.convert.foreign import leaves_of

# The script runs with no program in reach: whatever it would start becomes a call of
# command_not_found_handle, which writes the trainer's command line. Restricted, it can neither
# leave its folder nor write a file.
_PRELUDE = """
set() { :; }; kill() { :; }; trap() { :; }; sleep() { :; }; ulimit() { :; }; exec() { "$@"; }
command_not_found_handle() {
    for word in "$@"; do case "$word" in *main_ppo*|*main_dapo*|*main_*trainer*)
        printf '\\1\\0' >&3; printf '%s\\0' "$@" >&3; return 0;;
    esac; done
}
set -r
"""
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_CONFIG_NAME = re.compile(r"(?:--config-name|-cn)(?:=(.*))?")
_TIME_LIMIT_S = 20


def read_source(framework: str, path: Path) -> dict[str, Plain]:
    """Returns the options that a file sets. Raises ValueError if it cannot be read, or starts no
    trainer."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        given = plain_yaml(text, str(path))
        if not isinstance(given, dict):
            raise ValueError(f"{path}: should be sections or keys, is {given!r:.60}")
        return _interpolated(
            {
                key: cast(Plain, value)
                for key, value in leaves_of(given)
                if not key.endswith("_target_")
            }
        )
    if framework != "verl":
        raise ValueError(
            f"{path}: {framework} is read from YAML (.yaml); only verl has shell scripts"
        )
    words = _command(text, path)
    found = [match for word in words if (match := _OVERRIDE.fullmatch(word)) and "." in match[1]]
    given = {match[1]: plain_yaml(match[2], match[1]) for match in found}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if match := _CONFIG_NAME.fullmatch(word):
            given["--config-name"] = after if match[1] is None else match[1]
    return _interpolated(given)


def _command(text: str, path: Path) -> list[str]:
    """Returns the words of the trainer's command line, as bash makes them of the script's text."""
    # Output of the trainer that goes to a file could not be opened, and bash would leave the
    # command out.
    text = re.sub(r"(?<![\w=-])(?:\d|&)?>{1,2}\s*(?!&)[^\s|;&]+", "", text)
    read, write = os.pipe()
    try:
        environment = {
            "PATH": "/nonexistent",
            "HOME": "~",
        }  # no program; `~` is expanded when the experiment is read
        script = _PRELUDE.replace(">&3", f">&{write}") + text
        subprocess.run(
            ["/bin/bash", "-c", script, path.name],
            env=environment,
            pass_fds=[write],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{path}: started no trainer in {_TIME_LIMIT_S} s; give the command alone"
        ) from None
    finally:
        os.close(write)
        with os.fdopen(read, "rb") as stream:
            said = stream.read().decode("utf-8", "replace")
    commands = said.split("\1\0")[1:]
    if not commands:
        raise ValueError(f"{path}: has no command `python -m verl.trainer.main_ppo key=value ...`")
    return commands[0].split("\0")


def _interpolated(values: dict[str, Plain]) -> dict[str, Plain]:
    """Returns the values with `${key}` replaced by that key's value, as Hydra does; others stay as
    they are."""

    def resolved(value: Plain, depth: int = 0) -> Plain:
        if not isinstance(value, str) or "${" not in value or depth > 5:
            return value
        whole = re.fullmatch(r"\$\{([\w.]+)\}", value)
        if whole is not None and whole[1] in values:
            return resolved(values[whole[1]], depth + 1)
        return re.sub(
            r"\$\{([\w.]+)\}", lambda m: str(resolved(values.get(m[1], m[0]), depth + 1)), value
        )

    return {key: resolved(value) for key, value in values.items()}
