"""A frozen lake: the environment in configs/lake.yaml, and the moves for its warm-up.

4 x 4 fields as 16 characters: A the agent, G the goal, O a hole, "." ice. Each turn sees the
current map only.
"""

import random
from collections import deque

SIDE, MOVES = 4, 12
HOLE = 0.25  # of the fields between start and goal
STEPS = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
MAPS = 3828  # with a way to the goal


class Lake:
    """The model says L(eft), D(own), R(ight) or U(p); 1.0 at the goal, nothing in a hole or for
    another word."""

    def __init__(self, row: dict, seed: int):
        self.fields, self.at, self.left = row["prompt"].replace("A", "."), 0, MOVES

    def reset(self) -> str:
        """Returns the map."""
        return shown(self.fields, self.at)

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Returns the map after a move, the reward and whether the walk is over."""
        self.left -= 1
        if text not in STEPS:
            return None, 0.0, True
        self.at = moved(self.at, text)
        over = self.fields[self.at] in "OG" or self.left == 0
        return shown(self.fields, self.at), float(self.fields[self.at] == "G"), over


def shown(fields: str, at: int) -> str:
    """Returns the map with the agent in it."""
    return fields[:at] + "A" + fields[at + 1 :]


def moved(at: int, move: str) -> int:
    """Returns the field after a move; the border stops it."""
    down, right = STEPS[move]
    row, column = at // SIDE + down, at % SIDE + right
    return row * SIDE + column if 0 <= row < SIDE and 0 <= column < SIDE else at


def moves_to_goal(fields: str) -> dict[int, int]:
    """Returns, for every field from which the goal can be reached, the number of moves."""
    found, waiting = {SIDE * SIDE - 1: 0}, deque([SIDE * SIDE - 1])
    while waiting:
        at = waiting.popleft()
        for move in STEPS:
            before = moved(at, move)  # the way back: every move has its opposite
            if before not in found and fields[before] != "O":
                found[before] = found[at] + 1
                waiting.append(before)
    return found


def maps(sizes: dict[str, int], maps_of_warm_up: int, seed: int) -> dict[str, list[dict[str, str]]]:
    """Returns the rows of each file; no map is in two. The warm-up's are best moves on a few
    maps. Raises ValueError if there are too few maps."""
    numbers = sizes | {"sft": maps_of_warm_up}
    if (wanted := sum(numbers.values())) > MAPS:
        raise ValueError(
            f"dataset: {wanted} maps wanted (num_train, num_eval and num_sft_maps), but only {MAPS} "
            "have a way to the goal"
        )
    draw, seen = random.Random(f"lake {seed}"), set[str]()

    def new() -> str:
        while True:
            fields = (
                "."
                + "".join("O" if draw.random() < HOLE else "." for _ in range(SIDE * SIDE - 2))
                + "G"
            )
            if fields not in seen and 0 in moves_to_goal(fields):
                seen.add(fields)
                return fields

    files = {name: [new() for _ in range(number)] for name, number in numbers.items()}
    rows = {
        name: [{"prompt": shown(f, 0), "answer": str(moves_to_goal(f)[0])} for f in files[name]]
        for name in files
    }
    taught = []
    for fields in files["sft"]:
        far = moves_to_goal(fields)
        best = {
            at: [m for m in STEPS if far.get(moved(at, m), 99) < far[at]] for at in far if far[at]
        }
        taught += [
            {"prompt": shown(fields, at), "answer": move}
            for at, moves in best.items()
            for move in moves
        ]
    return rows | {"sft": draw.choices(taught, k=sizes["sft"])}
