"""What responses are expected to hold of an engine's cache, judged by those that came."""

_REMEMBERED = 4096  # samples: older ones were sampled by another policy
_ASSUMED = 8  # samples of the full length, with which it begins


def tokens_in_cache(mean: float, mean_square: float) -> float:
    """Returns E[L^2] / (2 E[L]), the mean response tokens of one running sample in an engine that is always busy.

    At any moment long responses are the larger part of what runs, and half done on average.
    """
    return mean_square / (2 * mean)


class ResponseLengths:
    """Learns how long responses are. For one event loop.

    max_tokens: limit of a response, which all are assumed to take before any has come.
    """

    def __init__(self, max_tokens: int) -> None:
        self._sums = [float(_ASSUMED * max_tokens**power) for power in range(3)]  # of length^0, length^1, length^2
        self._of_prompt: dict[int, tuple[int, int]] = {}  # by id: samples, and their tokens

    def add(self, prompt_id: int, length: int) -> None:
        """Adds a response to a prompt, in tokens."""
        keep = 1 - 1 / _REMEMBERED
        self._sums = [keep * total + length**power for power, total in enumerate(self._sums)]
        count, total = self._of_prompt.get(prompt_id, (0, 0))
        self._of_prompt[prompt_id] = count + 1, total + length

    def held(self) -> float:
        """Returns the mean response tokens of one running sample."""
        return tokens_in_cache(max(self._sums[1], 1.0), self._sums[2])

    def expected(self, prompt_id: int) -> float:
        """Returns the mean response to a prompt in tokens: to this one in earlier epochs, else to all."""
        if found := self._of_prompt.get(prompt_id):
            return found[1] / found[0]
        return self._sums[1] / self._sums[0]
