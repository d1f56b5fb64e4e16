"""How long responses are: given by three numbers or a file, or taken from the rollouts of an earlier run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megagrpo.config.schema import ExperimentConfig
from megagrpo.monitor.rollouts import read_rollouts
from megagrpo.system.run_folder import RunFolder

_POINTS = 4096  # of a distribution that is given by numbers
_Z99 = 2.3263  # standard normal, 0.99
_ASSUMED_MEDIAN = 0.3  # of the longest response, where nothing is known
_PROMPT_SHARE = 0.25  # of data.max_prompt_tokens that a prompt has, where nothing is known


@dataclass(frozen=True)
class Lengths:
    """Tokens of responses, float64 [points], ascending, each as probable as the next; of a prompt the mean."""

    prompt: float
    responses: np.ndarray
    origin: str

    @property
    def mean(self) -> float:
        """Returns the mean response in tokens."""
        return float(self.responses.mean())

    def percentile(self, share: float) -> float:
        """Returns the tokens that `share` of the responses do not exceed."""
        return float(np.quantile(self.responses, share))

    @property
    def held(self) -> float:
        """Returns the tokens that one running sample has on average in a cache that is always full.

        Prompt + E[L^2] / (2 E[L]): of what runs at a moment, long responses are the larger part.
        """
        return self.prompt + float((self.responses**2).mean() / (2 * self.responses.mean()))

    def spread(self, count: int) -> np.ndarray:
        """Returns `count` lengths with this distribution, ascending, float64 [count]: no chance in it."""
        return np.quantile(self.responses, (np.arange(count) + 0.5) / count)


def assumed_lengths(config: ExperimentConfig) -> Lengths:
    """Returns a log-normal distribution for an experiment of which no lengths are known."""
    longest = config.sampling.max_response_tokens
    median = _ASSUMED_MEDIAN * longest
    responses = _log_normal(median, longest, longest)
    prompt = _PROMPT_SHARE * config.data.max_prompt_tokens
    return Lengths(prompt, responses, f"assumed: log-normal, half of them up to {median:.0f}, 1 % at the limit")


def given_lengths(text: str, config: ExperimentConfig) -> Lengths:
    """Reads `--lengths`: MEAN, or MEAN/P50/P99, or a file with one number of tokens a line.

    Raises ValueError where the text is none of these or no distribution has these numbers.
    """
    prompt = _PROMPT_SHARE * config.data.max_prompt_tokens
    if Path(text).is_file():
        return Lengths(prompt, _sorted(Path(text).read_text().split(), text), f"file {text}")
    try:
        numbers = [float(part) for part in text.split("/")]
    except ValueError:
        raise ValueError(f"--lengths {text}: no such file, and not MEAN or MEAN/P50/P99 in tokens") from None
    if len(numbers) not in (1, 3) or not all(number > 0 for number in numbers):
        raise ValueError(f"--lengths {text}: give MEAN or MEAN/P50/P99 in tokens, all positive")
    longest = config.sampling.max_response_tokens
    if len(numbers) == 1:
        return Lengths(
            prompt, _with_mean(numbers[0], longest), f"log-normal with mean {numbers[0]:g}, at most {longest}"
        )
    mean, median, p99 = numbers
    return Lengths(prompt, _through(mean, median, p99, longest), f"mean {mean:g}, p50 {median:g}, p99 {p99:g}")


def lengths_of_run(folder: Path, config: ExperimentConfig) -> Lengths:
    """Reads the lengths of all samples in the rollouts of a run folder. Raises ValueError where it has none."""
    responses = [
        sample["num_tokens"]
        for files in RunFolder(folder).rollout_files().values()
        for group in read_rollouts(files.values())
        for sample in group["samples"]
    ]
    if not responses:
        raise ValueError(f"--lengths-from {folder}: it has no samples in rollouts/ (log.rollouts)")
    prompt = _PROMPT_SHARE * config.data.max_prompt_tokens  # the record has their texts alone
    return Lengths(prompt, _sorted(responses, str(folder)), f"{len(responses):,} samples of {folder}")


def _sorted(numbers: Sequence[str] | Sequence[int], where: str) -> np.ndarray:
    try:
        found = np.sort(np.array(numbers, dtype=np.float64))
    except ValueError as exc:
        raise ValueError(f"--lengths: {where}: not numbers of tokens: {exc}") from None
    if not len(found) or found[0] < 0 or found[-1] == 0:
        raise ValueError(f"--lengths: {where}: no positive numbers of tokens")
    return np.maximum(found, 1.0)


def _log_normal(median: float, p99: float, longest: float) -> np.ndarray:
    return np.clip(np.exp(math.log(median) + _scores() * math.log(p99 / median) / _Z99), 1.0, longest)


def _with_mean(mean: float, longest: float) -> np.ndarray:
    """Returns a log-normal distribution of the assumed shape, cut at `longest`, with this mean."""
    if mean > longest:
        raise ValueError(f"--lengths {mean:g}: sampling.max_response_tokens is {longest:g}")
    low, high = mean / 100, longest * 1e4
    for _ in range(100):
        median = math.sqrt(low * high)
        if _log_normal(median, median / _ASSUMED_MEDIAN, longest).mean() < mean:
            low = median
        else:
            high = median
    return _log_normal(high, high / _ASSUMED_MEDIAN, longest)


def _through(mean: float, median: float, p99: float, longest: float) -> np.ndarray:
    """Returns a log-normal distribution through p50 and p99 whose upper half is bent until the mean is right."""
    if not median <= p99 <= longest:
        raise ValueError(f"--lengths: p50 {median:g}, p99 {p99:g} and the longest response {longest:g} must ascend")
    straight = _log_normal(median, p99, longest)
    share = (np.arange(_POINTS) + 0.5) / _POINTS
    bump = np.where((share > 0.5) & (share < 0.99), (share - 0.5) * (0.99 - share), 0.0) * p99
    bent = straight + bump * (mean - straight.mean()) / max(bump.mean(), 1e-12)
    if (np.diff(bent) < -1e-6 * longest).any() or bent.max() > longest * (1 + 1e-9):
        raise ValueError(
            f"--lengths: no distribution like a log-normal one has mean {mean:g}, p50 {median:g}, p99 {p99:g}"
        )
    return bent


def _scores() -> np.ndarray:
    """Returns standard normal quantiles, float64 [_POINTS]."""
    return torch.special.ndtri((torch.arange(_POINTS, dtype=torch.float64) + 0.5) / _POINTS).numpy()
