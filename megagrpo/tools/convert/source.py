"""Reads what a user of verl, ROLL or TRL brings into one flat mapping: dotted key -> value."""

import os
import re
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from megagrpo.config.load import Plain, plain_yaml
from megagrpo.tools.convert.foreign import leaves_of

# The script runs with no program in reach: whatever it would start becomes a call of
# command_not_found_handle, which writes the trainer's command line. Restricted, it can neither
# leave its folder, nor write a file, nor name a program by its path, nor enable what is disabled
# here. A loop in the background ends at its tenth `sleep`: without that `wait` would not return.
_PRELUDE = """
set -r; enable -n kill exec trap ulimit
set() { :; }; kill() { :; }; trap() { :; }; ulimit() { :; }; exec() { "$@"; }
sleep() { if (( BASH_SUBSHELL && ++megagrpo_slept > 9 )); then exit; fi; }
command_not_found_handle() {
    for word in "$@"; do case "$word" in *main_ppo*|*main_dapo*|*main_*trainer*)
        printf '\\1\\0' >&3; printf '%s\\0' "$@" >&3; return 0;;
    esac; done
}
"""
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^{}]*))?\}")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_CONFIG_NAME = re.compile(r"(?:--config-name|-cn)(?:=(.*))?")
_TIME_LIMIT_S = 20
_POLL_S = 0.02


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
    # a file and no pipe: what the script leaves in the background would hold that
    with tempfile.TemporaryFile() as said:
        script = _PRELUDE.replace(">&3", f">&{said.fileno()}") + text
        shell = subprocess.Popen(
            ["/bin/bash", "-c", script, path.name],
            env={"PATH": "/nonexistent", "HOME": "~"},  # `~`: when the experiment is read
            pass_fds=[said.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with ExitStack() as stack:
            stack.callback(shell.wait)
            stack.callback(os.killpg, shell.pid, signal.SIGKILL)  # not waited for: still its id
            took_too_long = not _ends(shell.pid, _TIME_LIMIT_S)
        said.seek(0)
        commands = said.read().decode("utf-8", "replace").split("\1\0")[1:]
    if not commands and took_too_long:
        raise ValueError(f"{path}: started no trainer in {_TIME_LIMIT_S} s; give the command alone")
    if not commands:
        raise ValueError(f"{path}: has no command `python -m verl.trainer.main_ppo key=value ...`")
    return commands[0].split("\0")


def _ends(child: int, limit_s: float) -> bool:
    """Returns whether a child ends in time. It stays a zombie, so that its id remains ours."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            return True
        time.sleep(_POLL_S)
    return False


def _interpolated(values: dict[str, Plain]) -> dict[str, Plain]:
    """Returns the values with `${key}` and `${oc.select:key,default}` replaced by that key's value,
    as Hydra does; others stay as they are."""

    def found(match: re.Match[str], depth: int) -> Plain:
        if match[1] in values:
            return resolved(values[match[1]], depth + 1)
        return match[0] if match[2] is None else plain_yaml(match[2], match[0])

    def resolved(value: Plain, depth: int = 0) -> Plain:
        if not isinstance(value, str) or "${" not in value or depth > 5:
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole is not None:
            return found(whole, depth)
        return _REFERENCE.sub(lambda match: str(found(match, depth)), value)

    return {key: resolved(value) for key, value in values.items()}
