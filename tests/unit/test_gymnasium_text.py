"""The environment `gymnasium` over the library itself, if it is installed: real FrozenLake, and a space of texts."""

import pytest

from megagrpo.rollout.agents.environments import load_environment

gymnasium = pytest.importorskip("gymnasium")
LAKE = {"id": "FrozenLake-v1", "actions": "left down right up", "is_slippery": False}
MAP = ["SF", "HG"]


class Echo(gymnasium.Env):
    """Wants the text that it showed, twice."""

    action_space = observation_space = gymnasium.spaces.Text(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 2
        return f"say {self.np_random.integers(100)}", {}

    def step(self, action):
        self.left -= 1
        return "again", float(action == "yes"), self.left == 0, False, {}


def test_a_lake_is_walked_in_words_and_a_word_that_is_no_move_is_answered():
    make = load_environment("gymnasium")
    lake = make({"extra": {"desc": MAP}}, 3, **LAKE)
    assert lake.reset().split() == ["[S]F", "HG"], "the place is marked"
    assert lake.step("fly") == ("say one of: left down right up\n", 0.0, False)
    said, reward, done = lake.step(" Right ")
    assert said.split() == ["(Right)", "S[F]", "HG"] and (reward, done) == (0.0, False)
    assert lake.step("down") == (None, 1.0, True)
    lake.close()
    fell = make({"extra": {"desc": MAP}}, 3, **LAKE | {"actions": "Left Down Right Up"})
    fell.reset()
    assert fell.step("down") == (None, 0.0, True)
    with pytest.raises(ValueError, match="actions has 2 words, and FrozenLake-v1 has 4 actions"):
        make({"extra": {}}, 3, **LAKE | {"actions": "left right"})


def test_a_space_of_texts_takes_the_turn_itself_and_the_seed_makes_the_task():
    gymnasium.register("Echo-v0", entry_point=Echo, disable_env_checker=True)
    make = load_environment("gymnasium")
    games = [make({"extra": {}}, seed, id="Echo-v0", rendered=False) for seed in (5, 5, 6)]
    first, same, other = [game.reset() for game in games]
    assert first == same != other
    assert games[0].step("no") == ("again", 0.0, False) and games[0].step("yes") == (None, 1.0, True)
