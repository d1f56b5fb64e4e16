"""A trainer's command line as bash makes it of a script's text; no program of the script runs."""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from megagrpo.system.environment import for_a_bare_shell

# The script runs with no program in reach: whatever it would start becomes a call of
# command_not_found_handle, which writes the trainer's command line. Restricted, it can neither
# leave its folder, nor write a file, nor name a program by its path, nor enable what is disabled
# here. A loop that sleeps is left at its tenth `sleep` (of bash 4.3 a function could do that), in
# the background too: without that `wait` would not return.
_PRELUDE = r"""
BASH_COMPAT=43; set -r; enable -n kill exec trap ulimit
set() { :; }; kill() { :; }; trap() { :; }; ulimit() { :; }; exec() { "$@"; }
sleep() {
    if (( ++megagrpo_slept > 9 )); then megagrpo_slept=0; (( BASH_SUBSHELL )) && exit; break 9; fi
}
megagrpo_at=$PWD
cd() { case ${@: -1} in /*) megagrpo_at=${@: -1};; *) megagrpo_at=$megagrpo_at/${@: -1};; esac; }
pwd() { printf '%s\n' "$megagrpo_at"; }
dirname() { local path=./${@: -1}; case $path in .//*) path=${path#./};; esac; echo "${path%/*}"; }
basename() { local name=${1##*/}; printf '%s\n' "${name%"$2"}"; }
realpath() { printf '%s\n' "${@: -1}"; }
readlink() { realpath "$@"; }
seq() {
    local first=1 step=1 last=${@: -1}
    if (( $# > 1 )); then first=$1; fi
    if (( $# > 2 )); then step=$2; fi
    for (( ; step > 0 && first <= last; first += step )); do echo $first; done
}
source() {
    local file=$1 above=${0%/*}
    # the name that it has in the framework's repository
    while [[ ! -r $file && $above ]]; do
        file=$above/scripts/models/${1##*/} above=${above%/*}
    done
    if [[ -r $file ]]; then eval "$(<"$file")"; else printf '\1unread\0%s\0' "$1" >&3; fi
}
.() { source "$@"; }
bash() { if [[ $1 == -*c ]]; then eval "$2"; fi; }
sh() { bash "$@"; }
exit() {
    if (( ! BASH_SUBSHELL )); then
        printf '\1empty\0' >&3
        for name in EVERY; do [[ ${!name} ]] || printf '%s\0' "$name" >&3; done
    fi
    builtin exit "$@"
}
command_not_found_handle() {
    local word
    for word in "$@"; do case $word in TRAINERS)
        printf '\1command\0' >&3; printf '%s\0' "$@" >&3
        printf '\1unset\0' >&3
        for name in EVERY; do [[ ${!name+x} ]] || printf '%s\0' "$name" >&3; done
        return 0;;
    esac; done
    local line="$*"
    line=${line//[$'\2\3']/} # its own arguments may have a mark; and it is one word
    if [[ $MEGAGRPO_MARK ]]; then printf '\2%s\3' "${line//[[:space:]]/$'\4'}"; fi
}
"""
_NAME = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_HAS_DEFAULT = re.compile(r"\$\{(\w+):?[-=+?]")
_SETS = r"(?:^|[;\s]){0}=(?!\$\{{{0}\b)"  # a variable, not to its own value
_MARK = re.compile("\2([^\2\3]*)\3")
_TIME_LIMIT_S = 20
_ONE_MORE_S = 1  # for a second command, once there is one
_POLL_S = 0.02


@dataclass(frozen=True)
class Command:
    """The words of a command line, and what is to be said of them."""

    launcher: list[str]
    words: list[str]  # from the trainer's name on
    notes: list[str] = field(default_factory=list)


def trainer_command(path: Path, trainers: str, example: str) -> Command:
    """Returns the first command of a script whose words have one that fits `trainers`, patterns of
    bash's `case`.

    The caller's variables are used. What expands to nothing is noted: variables that are not set,
    programs that would have written it. Raises ValueError, with an `example`, if nothing starts a
    trainer.
    """
    text = path.read_text(encoding="utf-8")
    with_default = set(_HAS_DEFAULT.findall(text))
    patterns = trainers.split("|")
    names = list(dict.fromkeys(_names(text)))
    plain = [name for name in names if name not in with_default]
    script = _Script(text, path, trainers, names)
    found, took_too_long = script.run({})
    commands = [words for kind, words in found if kind == "command"]
    if not commands and took_too_long:
        raise ValueError(f"{path}: started no trainer in {_TIME_LIMIT_S} s; give the command alone")
    if not commands:
        empty = [name for kind, words in found if kind == "empty" for name in words]
        from_outside = [f"${name}" for name in empty if not re.search(_SETS.format(name), text)]
        wants = f"; it ends by `exit`, without {', '.join(from_outside)}" if from_outside else ""
        raise ValueError(f"{path}: has no command `{example}`{wants}")
    unset = {name for kind, words in found if kind == "unset" for name in words}
    missing = [name for name in plain if name in unset or name.isdecimal()]
    notes = [
        f"{name} could not be read; what it sets is missing"
        for name in dict.fromkeys(words[0] for kind, words in found if kind == "unread")
    ]
    words = commands[0]
    named = (n for n, word in enumerate(words) if any(fnmatchcase(word, p) for p in patterns))
    start = next(named)
    if missing or "$(" in text or "`" in text:
        # once more, with a mark in the place of what is missing
        marked, _ = script.run(
            {name: f"\2${name}\3" for name in missing} | {"MEGAGRPO_MARK": "yes"}
        )
        again = next((words for kind, words in marked if kind == "command"), [])
        notes += _expanded_to_nothing(text, again[start:])
    if len(commands) > 1:
        notes.append(f"{len(commands)} commands start a trainer; this is the first")
    return Command(words[:start], words[start:], notes)


@dataclass(frozen=True)
class _Script:
    text: str
    path: Path
    trainers: str
    names: Sequence[str]  # whose values are asked for

    def run(self, marks: Mapping[str, str]) -> tuple[list[tuple[str, list[str]]], bool]:
        """Returns what the script wrote, as (kind, words), and whether it had to be ended.

        marks: values of variables; with MEGAGRPO_MARK programs leave a mark in the place of their
        output.
        """
        # Output of the trainer that goes to a file could not be opened, and bash would leave the
        # command out.
        text = re.sub(r"(?<![\w=-])(?:\d|&)?>{1,2}\s*(?!&)[^\s|;&]+", "", self.text)
        text = re.sub(r"\$\{?BASH_SOURCE(?:\[0\])?\}?", "$0", text)
        # HOME is `~`, which is resolved when the experiment is read
        env = for_a_bare_shell()
        env |= {"PATH": "/nonexistent", "HOME": "~", "MEGAGRPO_MARK": ""}
        env |= {name: mark for name, mark in marks.items() if not name.isdecimal()}
        numbered = [marks.get(str(number), "") for number in range(1, 10)]
        while numbered and not numbered[-1]:
            numbered.pop()
        # a file and no pipe: what the script leaves in the background would hold that
        with tempfile.TemporaryFile() as said:
            prelude = _PRELUDE.replace(">&3", f">&{said.fileno()}")
            prelude = prelude.replace("TRAINERS", self.trainers)
            names = (name for name in self.names if not name.isdecimal())
            prelude = prelude.replace("EVERY", " ".join(names))
            shell = subprocess.Popen(
                [
                    *("/bin/bash", "-c", prelude + text),
                    *(str(self.path.absolute()), *numbered),
                ],
                env=env,
                pass_fds=[said.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            with ExitStack() as stack:
                stack.callback(shell.wait)
                stack.callback(os.killpg, shell.pid, signal.SIGKILL)  # not waited for: still its id
                ended = _ends(shell.pid, said.fileno())
            said.seek(0)
            written = said.read().decode("utf-8", "replace").split("\1")[1:]
        records = [record.split("\0")[:-1] for record in written]
        return [(kind, words) for kind, *words in records], not ended


def _ends(child: int, said: int) -> bool:
    """Returns whether a child ends in time, which is short as soon as it has written a command. It
    stays a zombie, so that its id remains ours."""
    deadline = time.monotonic() + _TIME_LIMIT_S
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            return True
        if b"\1unset" in os.pread(said, os.fstat(said).st_size, 0):
            deadline = min(deadline, time.monotonic() + _ONE_MORE_S)
        time.sleep(_POLL_S)
    return False


def _names(text: str) -> Iterator[str]:
    for match in _NAME.finditer(text):
        name = match[1] or match[2]
        if not name[0].isdecimal() or name in "123456789":
            yield name


def _expanded_to_nothing(text: str, words: Sequence[str]) -> Iterator[str]:
    """Yields a note for each mark in a command line, with the options that it is in."""
    keys: dict[str, list[str]] = {}
    option = ""
    for word in words:
        # "$@" is more of the command, given when the script is started
        whole = re.fullmatch("\2\\$[1-9]\3", word)
        if word.startswith("--") or "=" in word:
            option = _MARK.sub("", word.partition("=")[0])
        for mark in () if whole and re.search(r"\$[@*]", text) else _MARK.findall(word):
            keys.setdefault(mark.replace("\4", " "), []).append(option or "its command")
    for mark, options in keys.items():
        what = mark if mark.startswith("$") else f"$({mark})"
        line = _line_of(text, mark)
        where = f" (line {line})" if line else ""
        yield f"expanded to nothing: {what}{where}, in {', '.join(dict.fromkeys(options))}"


def _line_of(text: str, mark: str) -> int:
    """Returns the number of the first line that has a variable, or a program's output; 0 if none
    is found."""
    first = re.escape(mark.partition(" ")[0].removeprefix("$"))
    before = r"\$\{?" if mark.startswith("$") else r"(?:\$\(|`|\|)\s*"
    lines = enumerate(text.splitlines(), 1)
    return next((n for n, line in lines if re.search(rf"{before}{first}\b", line)), 0)
