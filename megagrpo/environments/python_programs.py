"""The environment `python`: the model writes programs, which run in the sandbox of grader `code`,
until it answers."""

from collections.abc import Mapping

from megagrpo.config.reward import CodeOptions
from megagrpo.environments.answers import answer_grader
from megagrpo.sandbox.grader import marked_programs
from megagrpo.sandbox.sandbox import Limits, isolates, run_program

_ABOUT = """You may write Python programs: a program between ```python and ``` runs, and what it prints follows.
Nothing is kept between two programs. Without a program your text is the answer.

{prompt}"""


class PythonPrograms:
    """A turn's last block marked as Python runs, in a process of its own; a turn without one is the
    answer.

    grader: of the answer, a name as in `reward.grader`. max_chars: shown, the last ones. run_s:
    seconds of a program.
    limits: memory_mb, output_kb, disk_mb, open_files, processes and isolation of grader `code`.
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
        options = CodeOptions.model_validate(limits)
        self._limits = Limits(
            wall_s=run_s, **options.model_dump(include=set(Limits.__annotations__))
        )
        self._isolate = isolates(options.isolation)
        self._prompt = row["prompt"]
        self._answer = answer_grader(grader, row)
        self._max_chars = max_chars

    def reset(self) -> str:
        """Returns what a program may do, and the row's prompt."""
        return _ABOUT.format(prompt=self._prompt)

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Returns what a program printed and how it failed, or the reward of an answer."""
        if not (programs := marked_programs(text)):
            return None, self._answer(text), True
        ended = run_program(programs[-1], b"", self._limits, self._isolate)
        printed = ended.stdout.decode(errors="replace")
        said = "\n".join(filter(None, (printed.rstrip("\n"), ended.problem)))
        return f"```output\n{said[-self._max_chars :]}\n```\n", 0.0, False
