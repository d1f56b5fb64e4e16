"""The environment `sql`: what a query may do, what counts as an answer; and the laptop examples' rows."""

import time
from itertools import product

import pytest

from examples.laptop.lake import MAPS, MOVES, Lake, maps, moves_to_goal
from examples.laptop.sql import LOOK, questions
from megagrpo.environments import sql
from megagrpo.environments.sql import Sql
from megagrpo.rollout.agents import UnusableRow

ENDLESS = "with recursive r(n) as (select 1 union all select n + 1 from r) select max(n) from r"
ROW = {
    "answer": "select name from pets where age > 3",
    "extra": {"database": "create table pets(name, age); insert into pets values ('a', 5), ('b', 3), ('c', 9)"},
}


@pytest.mark.parametrize(
    ("query", "reward"),
    [
        ("select name from pets where age > 3;", 1.0),
        ("```sql\nselect name from pets where age in (9, 5) order by age desc\n```", 1.0),
        ("```SQL\nselect name from pets where age > 3", 1.0),
        ("```sqlite\nselect name from pets where age > 3\n```", 1.0),
        ("```select name from pets where age > 3```", 1.0),
        ("```SELECT\n  name from pets where age > 3\n```", 1.0),
        ("with t as (select * from pets) select name from t where age >= 5", 1.0),
        ("select name from pets", 0.0),
        ("select name, age from pets where age > 3", 0.0),
        ("select name from pets where age > 100", 0.0),
    ],
)
def test_a_query_of_a_table_is_the_answer(query, reward):
    assert Sql(ROW, 0).step(query) == (None, reward, True)


@pytest.mark.parametrize("order", ["order by", "ORDER BY", "order  by", "order\n  by"])
def test_rows_have_an_order_where_the_answer_has_one(order):
    ordered = ROW | {"answer": f"select name from pets {order} age"}
    assert Sql(ordered, 0).step("select name from pets order by age")[1] == 1.0
    assert Sql(ordered, 0).step("select name from pets order by age desc")[1] == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "select name from pets where name <> 'order by'",
        "select name from (select name from pets order by age)",
        'select name as "order by" from pets',
        "select name from pets -- no order by",
        "select name from pets /* order\nby */",
    ],
)
def test_an_order_inside_the_answer_is_none_of_its_rows(answer):
    query = "select `name` from `pets` order by `age` desc"
    assert Sql(ROW | {"answer": answer}, 0).step(query)[1] == 1.0
    assert Sql(ROW | {"answer": answer}, 0).step(f"```\n{query} \n```")[1] == 1.0
    assert Sql(ROW, 0).step("select name from pets where age > 3 and `name` <> `age`")[1] == 1.0


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("select sql from sqlite_master", "CREATE TABLE pets(name, age)\n"),
        ("select name from sqlite_temp_master union select name from sqlite_temp_schema", "\n"),
        ("pragma table_info(pets)", "0|name||0|None|0\n1|age||0|None|0\n"),
        ("with c as (select 1) select count(*) from c", "1\n"),  # SQLite authorizes c as it does a table
        ("select 'a' union select 'c'", "a\nc\n"),  # a guess without a look at the table earns nothing
        ("select nam from pets", "error: no such column: nam\n"),
        ("selec", 'error: near "selec": syntax error\n'),
        ("", "\n"),
        ("select 1; select 2", "error: You can only execute one statement at a time.\n"),
        ("drop table pets", "error: not authorized\n"),
        ("insert into pets values ('d', 1)", "error: not authorized\n"),
        ("attach 'other.db' as other", "error: not authorized\n"),
        ("pragma journal_mode = wal", "error: not authorized\n"),
        ("select load_extension('x')", "error: not authorized\n"),
        ("select hex(zeroblob(100000000))", "error: string or blob too big\n"),
        (ENDLESS, "error: interrupted\n"),
        (ENDLESS.replace("max(n)", "zeroblob(900000)"), "error: more than 16,000,000 bytes of rows\n"),
        ("select \0", "error: the query contains a null character\n"),
        ("select 'a' like replace(hex(zeroblob(501)), '00', 'aa')", "error: LIKE or GLOB pattern too complex\n"),
    ],
)
def test_others_and_errors_are_shown_and_nothing_is_changed(query, said):
    environment, began = Sql(ROW, 0), time.monotonic()
    assert environment.step(query) == (said, 0.0, False) and time.monotonic() - began < 5
    assert environment.step(ROW["answer"]) == (None, 1.0, True)


def test_few_steps_that_take_long_are_bounded(monkeypatch):
    """Each compares 90,000 characters at 110,000 places."""
    monkeypatch.setattr(sql, "_CPU_S", 0.2)
    text, part = (f"replace(hex(zeroblob({size})), '00', 'a')" for size in (200_000, 90_000))
    numbers = "with recursive r(n) as (select 1 union all select n + 1 from r limit 9999)"
    slow = f"{numbers} select max(instr({text}, {part} || n)) from r"
    environment, began = Sql(ROW, 0, max_steps=40_000), time.thread_time()
    assert environment.step(slow) == ("error: interrupted\n", 0.0, False) and time.thread_time() - began < 10


def test_many_steps_may_take_long(monkeypatch):
    monkeypatch.setattr(sql, "_CPU_S", 0.0)
    many = "with recursive r(n) as (select 1 union all select n + 1 from r limit 9999) select max(n) from r"
    assert Sql(ROW, 0, max_steps=10_000_000).step(many) == ("9999\n", 0.0, False)


def test_what_is_shown_is_bounded():
    many = "with recursive r(n) as (select 1 union all select n + 1 from r limit 99) select n from r"
    assert Sql(ROW, 0, max_rows=2).step(many)[0] == "1\n2\n...\n"
    assert Sql(ROW, 0, max_chars=3).step(many)[0] == "1\n2\n[output cut]\n"
    assert Sql(ROW, 0, max_chars=10).step("selec")[0] == "error: nea\n[output cut]\n"
    assert Sql(ROW, 0, max_steps=1000).step(many.replace("99", "99999"))[0] == "error: interrupted\n"


@pytest.mark.parametrize(
    "wrong",
    [{"answer": "select x from pets"}, {"extra": {}}, {"extra": {"database": "creat"}}, {"extra": {"database": None}}],
)
def test_a_row_that_cannot_be_played_is_declared_so(wrong):
    with pytest.raises(UnusableRow):
        Sql(ROW | wrong, 0)


def test_the_warm_up_of_sql_is_what_the_environment_says():
    rows = questions(40, 3, "sft")
    assert any(LOOK in row["answer"] for row in rows)
    won = 0
    for row in rows:
        name = row["database"]["database"].split("(k,")[1].split(")")[0]
        last = row["answer"].split(";")[-2].rpartition("\n")[2]
        won += f"({name})" in last
        assert row["answer"].count(";") <= 3 and ("error: no such column" in row["answer"] or f"({name})" in last)
    assert 0 < won < len(rows), "names are random"
    for row in questions(5, 3, "train"):
        assert Sql(row | {"extra": row["database"]}, 0).step(row["answer"]) == (None, 1.0, True)


def test_lakes_can_be_crossed_and_no_map_is_in_two_files():
    files = maps({"sft": 300, "train": 50, "eval": 20}, 10, seed=1)
    train, held_out = ({row["prompt"] for row in files[name]} for name in ("train", "eval"))
    shown = {row["prompt"].replace("A", ".") for row in files["sft"]}
    assert (len(train), len(held_out)) == (50, 20) and not train & held_out and len(shown) <= 10
    assert not shown & {prompt.replace("A", ".") for prompt in train | held_out}
    best = {row["prompt"]: row["answer"] for row in files["sft"]}
    start = next(prompt for prompt in best if prompt[0] == "A")
    lake, done, moves = Lake({"prompt": start}, 0), False, 0
    said = lake.reset()
    while not done and said in best:
        said, reward, done = lake.step(best[said])
        moves += 1
    assert not done or (reward == 1.0 and moves == moves_to_goal(start.replace("A", "."))[0] <= MOVES)
    assert Lake({"prompt": start}, 0).step("X") == (None, 0.0, True)
    assert sum(0 in moves_to_goal(f".{''.join(fields)}G") for fields in product(".O", repeat=14)) == MAPS
    with pytest.raises(ValueError, match="3829 maps wanted .* only 3828 have a way to the goal"):
        maps({"sft": 4000, "train": 3000, "eval": 800}, 29, seed=1)
