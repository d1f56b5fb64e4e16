"""Rows drawn by the results of their last groups: `data.curriculum`.

A function gets the results of all rows and returns a weight for each. The rows of a batch are drawn
by these weights, without replacement. A batch is drawn in the step that first requests it, from the
groups of all earlier steps, so the rows are the same for any number of ranks and after a resume.
The rows of batches that are sampled ahead are part of the state.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain

import numpy as np

from megagrpo.config.schema import CurriculumConfig, ExperimentConfig
from megagrpo.data.prompts import Mixture, interleaved
from megagrpo.data.rows import Row
from megagrpo.system.errors import explained
from megagrpo.system.user_function import check_arguments, load_function
from megagrpo.types import Prompt, RolloutGroup, RowResults

POOLS = ("unseen", "hard", "medium", "easy")
_BUILT_IN = {name: f"{__name__}:{name}" for name in ("pools", "drop_solved")}

_UNSCORED = 0.05  # factor for the weight of a row whose groups have had no score

# (id of a group, the place of its row in the data, its pass rate, its mean reward; NaN: no score)
GroupResult = tuple[int, int, float, float]


@dataclass(frozen=True, eq=False)
class CurriculumRows(RowResults):
    """The argument of a curriculum function: the R rows in use, in the order of the data.

    pass_rate and reward_mean of an unseen row are NaN.
    """

    step: int  # the step that draws, from 1
    ids: np.ndarray  # [R] int64, Prompt.id: lines before the row, over all files
    sources: np.ndarray  # [R], names
    pools: np.ndarray  # [R] int64, indices into POOLS


def pools(
    rows: CurriculumRows,
    unseen: float = 1,
    hard: float = 0.5,
    medium: float = 1,
    easy: float = 0.1,
) -> np.ndarray:
    """Returns the weight of each row's pool."""
    return np.array([unseen, hard, medium, easy])[rows.pools]


def drop_solved(rows: CurriculumRows, return_after: int = 20) -> np.ndarray:
    """Returns 0 for easy rows whose last group is less than `return_after` steps old, else 1."""
    solved = rows.pools == POOLS.index("easy")
    return ~(solved & (rows.step - rows.last_step < return_after))


def load_curriculum(options: CurriculumConfig) -> Callable[[CurriculumRows], object]:
    """Returns the function with its arguments. Raises ValueError if it cannot be loaded or does not
    take them."""
    function = load_function(options.name, _BUILT_IN, "data.curriculum.name")
    check_arguments(
        "data.curriculum.args do not fit", options.name, function, ["rows"], options.args
    )
    return partial(function, **options.args)


def describe_curriculum(options: CurriculumConfig) -> str:
    """Returns the formula of a row's weight. Raises ValueError as load_curriculum."""
    _, *parameters = inspect.signature(load_curriculum(options)).parameters.values()
    args = ", ".join(f"{parameter.name} {parameter.default}" for parameter in parameters)
    return (
        f"by {options.name}({args}), p = fraction of rewards >= {options.pass_reward:g}; "
        f"hard p <= {options.hard_at_most:g}, easy p >= {options.easy_at_least:g}"
    )


@dataclass(frozen=True)
class Curriculum:
    """Draws from the R rows in use, and records the results of their groups."""

    options: CurriculumConfig
    seed: int
    rows: Sequence[Prompt | Row]
    mixture: Mixture = ()

    @classmethod
    def of(
        cls, config: ExperimentConfig, rows: Sequence[Prompt | Row], mixture: Mixture = ()
    ) -> "Curriculum | None":
        """Returns the curriculum of an experiment, if it has one. Raises ValueError if the first
        draw does."""
        if config.data.curriculum is None:
            return None
        curriculum = cls(config.data.curriculum, config.seed, rows, mixture)
        curriculum.draw(curriculum.unseen(), 1, 0, config.train.num_prompts_per_step)
        return curriculum

    def unseen(self) -> RowResults:
        """Returns the state before the first step."""
        none = np.zeros(len(self.rows))
        return RowResults(none, none, none, none, drawn=none[:0])

    def pools(self, results: RowResults) -> np.ndarray:
        """Returns the pool of each row, [R] int64: an index into POOLS."""
        rate = results.pass_rate
        options = self.options
        conditions = [
            results.times_seen == 0,
            rate <= options.hard_at_most,
            rate >= options.easy_at_least,
        ]
        return np.select(conditions, [0, 1, 3], 2)

    def draw(self, results: RowResults, step: int, place: int, count: int) -> list[int]:
        """Returns the rows of the groups place .. place + count - 1, all different; `step` draws.

        Ratios of sources hold as without a curriculum. Raises ValueError if the function does not
        return weights, or if too few rows have a weight above 0.
        """
        weights = self._weights(results, step)
        ratios, sizes = zip(*(self.mixture or [(1.0, len(self.rows))]), strict=True)
        sources = np.array([k for k, _ in interleaved(ratios, place, count)])
        drawn = np.zeros(count, np.int64)
        generator = np.random.Generator(np.random.Philox([self.seed, place]))
        start = 0
        for source, size in enumerate(sizes):
            places = np.flatnonzero(sources == source)
            chances = weights[start : start + size]
            chances = chances / (chances.sum() or 1.0)
            # a weight that is tiny beside the others becomes 0
            positive = np.count_nonzero(chances)
            if positive < len(places):
                rows = f"rows of source {self.rows[start].source}" if self.mixture else "rows"
                raise ValueError(
                    f"data.curriculum {self.options.name}: {positive} of {size} {rows} "
                    f"have a weight above 0, step {step} draws {len(places)}; change "
                    "data.curriculum.args (drop_solved: lower return_after), take more rows, or "
                    "lower train.num_prompts_per_step"
                )
            if len(places):
                drawn[places] = start + generator.choice(
                    size, len(places), replace=False, p=chances
                )
            start += size
        return drawn.tolist()

    def shown(
        self, results: RowResults, cursor: int, groups: Sequence[RolloutGroup]
    ) -> list[GroupResult]:
        """Returns the results of groups, NaN for one without a scored response. cursor: the id of
        the group of the first row drawn."""
        scored = [(g.group_id, [o.value for o in g.outcomes if o.ok]) for g in groups]
        limit = self.options.pass_reward
        return [
            (
                group_id,
                int(results.drawn[group_id - cursor]),
                sum(reward >= limit for reward in rewards) / len(rewards) if rewards else math.nan,
                sum(rewards) / len(rewards) if rewards else math.nan,
            )
            for group_id, rewards in scored
        ]

    def recorded(
        self, results: RowResults, shown: list[list[GroupResult]], step: int, consumed: int
    ) -> RowResults:
        """Returns the state after a step that consumed the first `consumed` of the rows drawn.
        shown: the results from each replica."""
        arrays = {name: array.copy() for name, array in vars(results).items()}
        for _, row, pass_rate, reward_mean in sorted(chain(*shown)):  # a row's last result counts
            arrays["last_step"][row] = step
            if math.isnan(pass_rate):
                continue
            arrays["times_seen"][row] += 1
            arrays["pass_rate"][row] = pass_rate
            arrays["reward_mean"][row] = reward_mean
        return RowResults(**arrays | {"drawn": results.drawn[consumed:]})

    @cached_property
    def _names(self) -> list[Sequence[int | str]]:
        """The ids and the sources of the rows: read once, since rows may be on disk."""
        return list(zip(*((row.id, row.source) for row in self.rows), strict=True))

    def _weights(self, results: RowResults, step: int) -> np.ndarray:
        """Returns the weight of each row, [R] float64. Raises ValueError naming the function."""
        rows = self.rows
        # copies: a function may write into what it gets
        arrays = {name: array.copy() for name, array in vars(results).items()}
        for name in ("pass_rate", "reward_mean"):
            arrays[name][results.times_seen == 0] = np.nan
        argument = CurriculumRows(
            **arrays,
            step=step,
            ids=np.array(self._names[0]),
            sources=np.array(self._names[1]),
            pools=self.pools(results),
        )
        setting = f"data.curriculum.name {self.options.name!r}"
        expected = f"{setting} returns a weight for each row in use, [{len(rows)}]"
        function = load_curriculum(self.options)
        with explained(f"{expected}; it failed"):
            weights = np.asarray(function(argument), np.float64)
        if weights.shape != (len(rows),):
            raise ValueError(f"{expected}; it returned {list(weights.shape)}")
        wrong = ~(np.isfinite(weights) & (weights >= 0))
        if wrong.any():
            first = int(wrong.argmax())
            raise ValueError(
                f"{setting} returned {weights[first]} for {rows[first].location} (step {step}); "
                "weights are finite and at least 0, and pass_rate is NaN until a row has a group"
            )
        # else those whose grader always fails stay unseen, and fill the batches
        unscored = (results.times_seen == 0) & (results.last_step > 0)
        return np.where(unscored, weights * _UNSCORED, weights)
