"""The environment `gymnasium`: an environment of that library in words. Users install the
library."""

import re
from collections.abc import Mapping

# a colored text, such as the player's place
_MARKED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumText:
    """An environment whose action is a turn of the model: the text itself, or the word for an
    action.

    id: the name in gymnasium. actions: words for the actions of a Discrete space, in their order;
    default: numbers. rendered: show the rendered text ("ansi"), with [ ] for colors, instead of the
    observations. options: for gymnasium.make; a row's `extra` adds more of them.
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
            self._words = actions.lower().split() or [str(space.start + n) for n in range(space.n)]
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
        """Returns the next observation and the reward; for a word that is not an action, the list
        of actions."""
        action: object = text
        if self._words is not None:
            word = text.strip().lower()
            if word not in self._words:
                return f"say one of: {' '.join(self._words)}\n", 0.0, False
            action = self._first + self._words.index(word)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        done = bool(terminated or truncated)
        return None if done else self._text(observation), float(reward), done

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def _text(self, observation: object) -> str:
        return _MARKED.sub(r"[\1]", str(self._env.render() if self._rendered else observation))
