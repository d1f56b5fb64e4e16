"""The environment `python`: the model writes programs, which run in the sandbox of grader `code`,
until it answers."""

from collections.abc import Mapping

from megagrpo.config.reward import CodeOptions
from megagrpo.environments.answers import answer_grader, shortened
from megagrpo.sandbox.grader import marked_programs, program_limits
from megagrpo.sandbox.sandbox import Limits, isolates, run_program

_ABOUT = """You may write Python programs: a program between ```python and ``` runs, and what it prints follows.
Nothing is kept between two programs. Without a program your text is the answer.

{prompt}"""


class PythonPrograms:
    """Runs a turn's last block that is marked as Python in a separate process; a turn without one
    is the answer.

    grader: the answer's, a name as in `reward.grader`. max_chars: the last ones of an output, which
    the model sees. run_s: seconds for a program. limits: memory_mb, output_kb, disk_mb, open_files,
    processes and isolation as in grader `code`.
    """

    def __init__(
        self,
        row: Mapping[str, object],
        seed: int,
        grader: str,
        max_chars: int = 2000,
        run_s: float = 5.0,
        **limits: int | str,
    ):
        if unknown := limits.keys() - {*Limits.__annotations__, "isolation"}:
            raise ValueError(f"args of environment python: nothing reads {min(unknown)!r}")
        options = CodeOptions.model_validate(limits)
        self._limits = program_limits(options, run_s)
        self._isolate = isolates(options.isolation)
        self._prompt = row["prompt"]
        self._answer = answer_grader(grader, row)
        self._max_chars = max_chars

    def reset(self) -> str:
        """Returns the rules for programs, and the row's prompt."""
        return _ABOUT.format(prompt=self._prompt)

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Returns the output and the failure of a program, or the reward of an answer."""
        programs = marked_programs(text)
        if not programs:
            return None, self._answer(text), True
        ended = run_program(programs[-1], b"", self._limits, self._isolate)
        printed = ended.stdout.decode(errors="replace")
        output = "\n".join(filter(None, (printed.rstrip("\n"), ended.problem)))
        return f"```output\n{shortened(output, self._max_chars, end=True)}\n```\n", 0.0, False
