"""The table of graders.

A grader is a function `grade(text, answer, **args)` that returns a score, (score, remark), or
rewards of parts of the response (rewards/part_rewards.py). Parameters `data_source` and `extra_info` get
the row's values. A grader may also have the signature of verl, `compute_score(data_source,
solution_str, ground_truth, extra_info)`, or of TRL, `f(completions, **columns)`, which gets and
returns lists of length one. A group grader is a function `f(texts, answer, scores, **args)` that
returns a list of scores.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence

from megagrpo.config.reward import OPTIONS, GraderArgs, check_options
from megagrpo.system.errors import translated
from megagrpo.system.user_function import check_arguments, load_function

GraderFunction = Callable[..., object]  # (response text, answer of the data file, **reward.args)
GroupFunction = Callable[..., list[float]]  # (texts, answer, scores, **reward.group_args)

BUILT_IN = {  # named, not imported: only `math` should pay for sympy
    "code": "megagrpo.sandbox.grader:grade",
    "exact": "megagrpo.rewards.graders.format:exact",
    "format": "megagrpo.rewards.graders.format:grade",
    "gsm8k": "megagrpo.rewards.graders.gsm8k:grade",
    "math": "megagrpo.rewards.graders.math:grade",
    "math_dapo": "megagrpo.rewards.graders.math_dapo:grade",
}
SERVICES = ("http", "judge")  # the leader calls them over the network, see services.py
_ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "target", "label")  # as data sets name it
GROUP_BUILT_IN = {
    "distinct": "megagrpo.rewards.group_graders:distinct",
    "rank": "megagrpo.rewards.group_graders:rank",
}
_RUNNER = asyncio.Runner()  # one loop, which the clients of a user's module keep


def load_grader(name: str, args: GraderArgs) -> GraderFunction:
    """Returns the grader `name`, a built-in or the user's own `package.module:function`.

    Raises ValueError for an unknown name, a module that cannot be imported, or `args` that the
    function rejects.
    """
    known = BUILT_IN | dict.fromkeys(SERVICES, "")  # services never come here
    function = load_function(name, known, "reward.grader")
    misfit = "reward.args do not fit grader"
    if name in OPTIONS:
        check_options(name, args)
    elif _is_trls(function):
        with translated(f"{misfit} {name!r}", TypeError):
            inspect.signature(function).bind_partial(**args)
    else:
        positional, named = _inputs(function)
        check_arguments(misfit, name, function, positional, args, named)
    return function


def call_grader(function: GraderFunction, args: GraderArgs, inputs: Sequence[object]) -> object:
    """Returns the grader's value for a response.

    inputs: text and answer; then the source and the extra values of the row, for graders that name
    them; then, for TRL's, the prompt (its messages if it is a chat) and whether it is a chat.
    """
    if _is_trls(function):
        value = _awaited(function(**_columns(function, args, inputs), **args))
        if not isinstance(value, list) or len(value) != 1:
            raise ValueError(f"returned {value!r:.80}, not a list of one score for one completion")
        return value[0]  # None leaves the response out of TRL's sum
    names = ("text", "answer", "data_source", "extra_info", "solution_str", "ground_truth")
    values = dict(zip(names, (*inputs[:4], *inputs[:2]), strict=True))
    positional, named = _inputs(function)
    given = {name: values[name] for name in named}
    return _awaited(function(*(values[name] for name in positional), **given, **args))


def _awaited(value: object) -> object:
    """Returns the value of a function that may be asynchronous, as in verl and TRL."""
    return _RUNNER.run(value) if inspect.iscoroutine(value) else value


def _is_trls(function: GraderFunction) -> bool:
    return "completions" in inspect.signature(function).parameters


def _columns(
    function: GraderFunction, args: GraderArgs, inputs: Sequence[object]
) -> dict[str, list[object]]:
    """Returns the arguments of a TRL reward function for one response: the text (after a chat, the
    message), and columns by name: those of the `data.extra_key` object, else the answer."""
    text, answer, _, extra, *prompt = inputs
    question, chat = prompt or ("", False)
    known: dict[str, object] = {
        "completions": [{"role": "assistant", "content": text}] if chat else text,
        "prompts": question,
    }
    row = extra if isinstance(extra, dict) else {}
    columns = ["completions"]
    for name, parameter in inspect.signature(function).parameters.items():
        match parameter.kind:
            case parameter.POSITIONAL_OR_KEYWORD | parameter.KEYWORD_ONLY:
                if parameter.default is parameter.empty or name in (*row, *_ANSWER_COLUMNS):
                    columns.append(name)
            case parameter.VAR_KEYWORD:
                columns += ["prompts", *row, *_ANSWER_COLUMNS]
    return {
        name: [known.get(name, row.get(name, answer))]
        for name in dict.fromkeys(columns)
        if name not in args
    }


def required_columns(name: str, args: GraderArgs) -> set[str]:
    """Returns the columns of `data.extra_key` that a TRL reward function cannot do without, the
    answer's under another name among them; none for other graders."""
    if name in BUILT_IN or name in SERVICES:
        return set()
    function = load_function(name, BUILT_IN, "reward.grader")
    if not _is_trls(function):
        return set()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = {
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in named and parameter.default is parameter.empty
    }
    return needed - {"completions", "prompts", *args, *_ANSWER_COLUMNS}


def _inputs(function: GraderFunction) -> tuple[list[str], list[str]]:
    """Returns the inputs that a grader takes by position, and those that it takes by name."""
    parameters = inspect.signature(function).parameters
    row_inputs = [name for name in ("data_source", "extra_info") if name in parameters]
    if {"solution_str", "ground_truth"} <= parameters.keys():
        return [], ["solution_str", "ground_truth", *row_inputs]
    return ["text", "answer"], row_inputs


def load_group_grader(name: str, args: GraderArgs) -> GroupFunction:
    """Returns the group grader `name`; see load_grader."""
    function = load_function(name, GROUP_BUILT_IN, "reward.group_grader")
    check_arguments(
        "reward.group_args do not fit grader", name, function, ["texts", "answer", "scores"], args
    )
    return function


def check_grader(name: str, args: GraderArgs) -> None:
    """Raises ValueError if a grader cannot work as configured. Calls no service: it may not be
    reachable from here."""
    if name in SERVICES:
        check_options(name, args)
        if name == "judge":
            # httpx is not needed to check other graders
            from megagrpo.rewards.graders.judge import read_template

            read_template(str(args["prompt_file"]))
    else:
        load_grader(name, args)


def check_answer(name: str, answer: str) -> None:
    """Raises ValueError for an answer of the data with which a grader cannot work."""
    if name == "code":
        load_function("megagrpo.sandbox.test_cases:read_tests", {}, "reward.grader")(answer)


def machine_problem(name: str, args: GraderArgs) -> str:
    """Returns why a grader cannot run on this machine, with the remedy; "" if it can."""
    if name != "code":
        return ""
    return load_function("megagrpo.sandbox.sandbox:machine_problem", {}, "reward.grader")(args)
