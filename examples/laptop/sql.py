"""Text to SQL: the databases of configs/sql.yaml, and what its warm-up is shown; the environment is `sql`.

Every database has one table, whose column of prices has one of four names. The question does not say which: a query of
the schema does, and a query with a wrong name gets SQLite's error.
"""

import random
from typing import Any

from megagrpo.rollout.agents.built_in.sql import Sql

NAMES, FUNCTIONS, KEYS = ("cost", "fee", "rate", "due"), ("max", "min", "sum", "avg"), 5
TURNS = 3
LOOK = "select sql from sqlite_master;"


def questions(num: int, seed: int, file: str) -> list[dict[str, Any]]:
    """Returns rows; those of "sft" with a whole rollout of true messages and random names, for the form alone."""
    draw, rows = random.Random(f"sql {seed} {file}"), []
    for _ in range(num):
        name, function, key = draw.choice(NAMES), draw.choice(FUNCTIONS), draw.randrange(KEYS)
        values = [(k, draw.randrange(10, 100)) for k in range(KEYS) for _ in range(3)]
        inserted = ",".join(f"({k},{value})" for k, value in values)
        database = f"create table t(k,{name}); insert into t values {inserted}"
        answer = f"select {function}({name}) from t where k={key};"
        row: dict[str, Any] = {"prompt": f"{function} price of k={key}\n", "answer": answer}
        row["database"] = {"database": database}
        rows.append(row | {"answer": _game(row, function, key, draw)} if file == "sft" else row)
    return rows


def _game(row: dict[str, Any], function: str, key: int, draw: random.Random) -> str:
    """Returns the turns of a player who tries names at random, and looks at the schema first in one of four games."""
    environment, text = Sql(row | {"extra": row["database"]}, 0), ""
    for turn in range(TURNS):
        look = turn == 0 and draw.random() < 0.25
        query = LOOK if look else f"select {function}({draw.choice(NAMES)}) from t where k={key};"
        said, _, done = environment.step(query)
        text += query + ("" if said is None else said)
        if done:
            break
    return text
