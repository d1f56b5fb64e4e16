"""The lengths and turns that a plan assumes: what engines read again, and how long nobody samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean

from megagrpo.check.engine_memory import Lengths, assumed_lengths, assumed_prompt, sorted_lengths
from megagrpo.config.rollout import SamplingConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.system.errors import explained
from megagrpo.system.user_function import did_you_mean

_TURNS_SHARE = 0.5  # of max_turns, if nothing is known
_TOOL_SECONDS = ("environment/rollout_s", "agent/program_s")  # of a rollout


@dataclass(frozen=True)
class Turns:
    """Means of a rollout. Without tools it has one turn, of which the model samples every token."""

    count: float = 1.0  # turns of the model
    tool_s: float = 0.0  # seconds between two of them
    said: float = 0.0  # share of a response's tokens that tools or the environment said
    found: float = 1.0  # share of what a turn reads again that a prefix cache has
    origin: str = ""

    def __post_init__(self) -> None:
        if self.count < 1 or self.tool_s < 0 or not (0 <= self.said < 1 and 0 <= self.found <= 1):
            raise ValueError(
                "count is at least 1, tool_s at least 0, said from 0 to below 1, found from 0 to 1"
            )

    @property
    def waited_s(self) -> float:
        """Returns the seconds in which a rollout waits for tools."""
        return (self.count - 1) * self.tool_s

    def tokens_read(self, prompt: float, response: float) -> float:
        """Returns the tokens that an engine reads after a rollout's first turn, if all turns are
        equally long."""
        again = (self.count - 1) * (prompt + response / 2)
        return self.said * response + (1 - self.found) * again


ONE_TURN = Turns()


def assumed_turns(sampling: SamplingConfig) -> Turns:
    """Returns the bound for an experiment of whose turns nothing is known: tools take no time,
    caches have all."""
    played = sampling.agent or sampling.environment
    if played is None:
        return ONE_TURN
    return Turns(
        max(1.0, _TURNS_SHARE * played.max_turns), origin=f"assumed: {_TURNS_SHARE:g} of max_turns"
    )


def given_turns(text: str, assumed: Turns) -> Turns:
    """Reads `--turns`, "count=20 tool_s=3 said=0.6 found=0.85"; what it lacks is as assumed. Raises
    ValueError."""
    names = [field.name for field in fields(Turns) if field.name != "origin"]
    values = {name: getattr(assumed, name) for name in names}
    for word in text.split():
        name, _, value = word.partition("=")
        if name not in names:
            raise ValueError(
                f"--turns {text}: {name!r} is none of {', '.join(names)}{did_you_mean(name, names)}"
            )
        with explained(f"--turns {text}: {word!r}"):
            values[name] = float(value)
    with explained(f"--turns {text}"):
        return Turns(**values, origin="--turns")


def turns_of_run(entries: Sequence[Mapping[str, float]], origin: str) -> Turns:
    """Returns the means over the steps of a run's metrics.jsonl; of a run without tools one
    turn."""
    means = {
        name: fmean(found)
        for name in (
            "response/turns_mean",
            "response/tool_token_fraction",
            "prefix/hit_fraction",
            *_TOOL_SECONDS,
        )
        if (found := [entry[name] for entry in entries if entry.get(name) is not None])
    }
    count = max(1.0, means.get("response/turns_mean", 1.0))
    if count == 1.0:
        return ONE_TURN
    waited = sum(means.get(name, 0.0) for name in _TOOL_SECONDS)
    said, cached = (
        means.get("response/tool_token_fraction", 0.0),
        means.get("prefix/hit_fraction", 1.0),
    )
    return Turns(count, waited / (count - 1), said, cached, origin)


def given_lengths(text: str, config: ExperimentConfig) -> Lengths:
    """Reads `--lengths`: a mean, or a file with one number of tokens a line. Raises ValueError for
    other text."""
    if Path(text).is_file():
        numbers = [float(word) for word in Path(text).read_text().split()]
        return Lengths(assumed_prompt(config), sorted_lengths(numbers, text), f"file {text}")
    if (
        not text.replace(".", "", 1).isdecimal()
        or not 0 < float(text) <= config.sampling.max_response_tokens
    ):
        limit = f"sampling.max_response_tokens {config.sampling.max_response_tokens}"
        raise ValueError(f"--lengths {text}: no such file, and no mean between 0 and {limit}")
    return assumed_lengths(config, float(text))
