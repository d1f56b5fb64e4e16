"""Text to SQL: the databases for configs/sql.yaml, and the rollouts for its warm-up. The environment
is `sql`.

Every database has one table, whose column of prices has one of four names. The question does not
say which: a query of the schema does, and a query with a wrong name gets SQLite's error.
"""

import random
from typing import Any

from megagrpo.environments.sql import Sql

NAMES, FUNCTIONS, KEYS = ("cost", "fee", "rate", "due"), ("max", "min", "sum", "avg"), 5
TURNS, LOOKS = 3, 0.25  # of a rollout; the share of the warm-up's games that begin with the schema
LOOK = "select sql from sqlite_master;"


def questions(num: int, seed: int, file: str) -> list[dict[str, Any]]:
    """Returns rows; those of "sft" with a whole rollout of true messages."""
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
    """Returns the turns of a player who in one of four games looks at the schema and knows the
    name, or guesses."""
    environment, text = Sql(row | {"extra": row["database"]}, 0), ""
    known = (
        next(name for name in NAMES if f"({name})" in row["answer"])
        if draw.random() < LOOKS
        else None
    )
    for turn in range(TURNS):
        name = known or draw.choice(NAMES)
        query = LOOK if known and turn == 0 else f"select {function}({name}) from t where k={key};"
        said, _, done = environment.step(query)
        text += query + ("" if said is None else said)
        if done:
            break
    return text
