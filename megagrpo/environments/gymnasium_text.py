"""The environment `gymnasium`: one of that library's, in words. The library is the user's to
install."""

import re
from collections.abc import Mapping

# a colored text, such as the player's place
_MARKED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumText:
    """An environment whose action is a turn of the model: the text itself, or the word of an
    action.

    id: its name in gymnasium. actions: words for the actions of a Discrete space, in their order;
    default: numbers.
    rendered: observations are what it renders as text ("ansi"), with [ ] for colors, else the
    observations themselves.
    options: of gymnasium.make; a row's `extra` has more of them.
    """

    def __init__(
        self,
        row: Mapping[str, dict],
        seed: int,
        id: str,
        actions: str = "",
        rendered: bool = True,
        **options: str | float,
    ):
        import gymnasium

        mode = {"render_mode": "ansi"} if rendered else {}
        self._env = gymnasium.make(id, **mode, **options, **row["extra"])
        self._seed = seed
        self._rendered = rendered
        space = self._env.action_space
        self._words: list[str] | None = None  # of a Discrete space
        if isinstance(space, gymnasium.spaces.Discrete):
            self._words = actions.split() or [str(space.start + n) for n in range(space.n)]
            self._first = space.start
            if len(self._words) != space.n:
                raise ValueError(
                    f"actions has {len(self._words)} words, and {id} has {space.n} actions"
                )

    def reset(self) -> str:
        """Returns the first observation."""
        observation, _ = self._env.reset(seed=self._seed % 2**32)
        return self._text(observation)

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Returns the next observation and the reward; a word that is no action is answered with
        the actions."""
        action: object = text
        if self._words is not None:
            if (word := text.strip().lower()) not in self._words:
                return f"say one of: {' '.join(self._words)}\n", 0.0, False
            action = self._first + self._words.index(word)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        done = bool(terminated or truncated)
        return None if done else self._text(observation), float(reward), done

    def close(self) -> None:
        """Closes it."""
        self._env.close()

    def _text(self, observation: object) -> str:
        return _MARKED.sub(r"[\1]", str(self._env.render() if self._rendered else observation))
