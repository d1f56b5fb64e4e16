"""Grades texts whose scores are known beforehand, to find a grader that cannot work before a
run."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from megagrpo.config.reward import GraderArgs, RewardConfig
from megagrpo.rewards.graders.functions import SERVICES, machine_problem
from megagrpo.rewards.pool import RewardPool
from megagrpo.types import Outcome, Prompt

_ROWS = 3  # of each source and grader
_FORMS = ("{}", r"\boxed{{{}}}", "#### {}")  # in which graders look for an answer
_SENTENCE = "I do not know."


@dataclass(frozen=True)
class TrialScores:
    """The graders' verdicts on the texts of some rows."""

    away: list[str]  # graders that cannot be reached from here
    lines: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def first_of_each(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Yields the first prompts of each source and grader."""
    seen = Counter[tuple[str, str | None]]()
    for prompt in prompts:
        seen[prompt.source, prompt.grader] += 1
        if seen[prompt.source, prompt.grader] <= _ROWS:
            yield prompt


def grade_trial_texts(reward: RewardConfig, prompts: Sequence[Prompt]) -> TrialScores:
    """Grades each prompt's answer, the empty response and a sentence in a run's processes.

    A row for which none of them gets a score is a problem. Raises ValueError and WorkerError like
    RewardPool.
    """
    here = [entry for entry in reward.entries if _runs_here(entry.grader, entry.args)]
    away = [entry for entry in reward.entries if entry not in here]
    names = {name for entry in away for name in (entry.short_name, entry.grader)}
    trial = TrialScores([entry.short_name for entry in away])
    graded = [
        prompt
        for prompt in prompts
        if prompt.grader is None or (prompt.grader not in names and _runs_here(prompt.grader, {}))
    ]
    if not here or not graded:
        return trial
    local = reward.model_copy(update={"graders": here, "workers": min(reward.workers, _ROWS)})
    with RewardPool(local) as pool:
        futures = [
            [pool.submit(prompt, text.format(prompt.answer)) for text in (*_FORMS, "", _SENTENCE)]
            for prompt in graded
        ]
        outcomes = [[future.result() for future in row] for row in futures]
    rows = [(prompt, *_judge(prompt, row)) for prompt, row in zip(graded, outcomes, strict=True)]
    trial.lines.extend(line for _, line, _, _ in rows if line)
    trial.problems.extend(_once([(prompt, text) for prompt, _, text, _ in rows if text]))
    trial.advice.extend(_once([(prompt, text) for prompt, *_, texts in rows for text in texts]))
    return trial


def _once(found: Sequence[tuple[Prompt, str]]) -> Iterator[str]:
    """Yields each text once, by the first row with it."""
    numbers = Counter(text for _, text in found)
    firsts = {text: prompt for prompt, text in reversed(found)}
    for text, number in numbers.items():
        prompt = firsts[text]
        extra = f"; extra_info was {prompt.extra!r:.80}" if prompt.extra else ""
        others = f" (and {number - 1} more of the rows that were tried)" if number > 1 else ""
        yield f"{prompt.location}: {text}{extra}{others}"


def _judge(prompt: Prompt, outcomes: Sequence[Outcome]) -> tuple[str, str, list[str]]:
    """Returns the line and the advice of a row whose own answer gets a score, else its problem."""
    *answers, empty, sentence = outcomes
    best = max(answers, key=lambda outcome: (outcome.ok, outcome.value))
    failed = [outcome.detail for outcome in (best, empty, sentence) if not outcome.ok]
    if not best.ok:
        which = "no response" if len(failed) == 3 else "not even its own answer"
        return "", f"{which} gets a score: {failed[0]}", []
    form = _FORMS[answers.index(best)].format("...")
    says = "" if form == "..." else f" as {form}"
    line = (
        f"{prompt.location}: its own answer{says} gets {_score(best)}, '' {_score(empty)}, "
        f"{_SENTENCE!r} {_score(sentence)}"
    )
    advice = []
    if failed:
        advice.append(
            f"{failed[-1]:.160}; such a response is no 0, it is left out, and "
            "too many stop the run: let the grader return 0.0"
        )
    if max(empty.value, sentence.value) > best.value:
        advice.append("a text that is no answer gets more than the answer itself")
    if not failed and best.value == empty.value == sentence.value:
        advice.append(f"the answer, '' and {_SENTENCE!r} get the same: there is nothing to learn")
    return line, "", advice


def _score(outcome: Outcome) -> str:
    return f"{outcome.value:g}" if outcome.ok else f"no score ({outcome.status})"


def _runs_here(grader: str, args: GraderArgs) -> bool:
    return grader not in SERVICES and not machine_problem(grader, args)
