"""Makes small verifiable tasks for tiny models: lines of {"prompt": "37+48=", "answer": "85"}.

They go into sft.jsonl, train.jsonl and eval.jsonl. No expression is in two of the three files (but
guess has 20 goals in all), and the same seed always writes the same bytes.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Set
from pathlib import Path

from examples.laptop.guess import games
from examples.laptop.lake import maps
from examples.laptop.recipe import DatasetConfig
from examples.laptop.repositories import rows as repositories
from examples.laptop.sql import questions
from examples.laptop.squares import pictures
from examples.laptop.word_problems import word_problems
from megagrpo.environments.calculator import exact_value
from megagrpo.system.run_folder import write_json_lines

_MAX_FACTOR = 12  # second factor of a product: the table that schools teach
_MAX_TRIES = 100  # per expression of the warm-up; about 2 are needed
_NUMBER = re.compile(r"\d*\.?\d+")
_OPERATORS = frozenset("+-*/")
_ANNOTATION = re.compile(r"<<([^<>]*)>>")

Row = dict[str, str]


def make_dataset(config: DatasetConfig, seed: int) -> dict[str, int]:
    """Writes the three files in `config.folder`, each completely or not at all.

    Returns how many problems were found, dropped (by reason) and written. Raises ValueError when there are too
    few different problems or when the source is missing.
    """
    if config.calculator and config.kind != "arithmetic":
        raise ValueError(f"dataset.calculator belongs to kind arithmetic; kind is {config.kind}")
    sizes = {"sft": config.num_sft, "train": config.num_train, "eval": config.num_eval}
    match config.kind:
        case "arithmetic":
            files, counts = _arithmetic(config, seed)
        case "gsm8k_calc":
            files, counts = _gsm8k_calc(config, seed)
        case "word_problems":
            files, counts = word_problems(config, seed)
        case "guess":
            files, counts = {name: games(num, seed, name) for name, num in sizes.items()}, {}
        case "squares":
            files, counts = pictures(config, seed), {}
        case "sql":
            files, counts = {name: questions(num, seed, name) for name, num in sizes.items()}, {}
        case "repositories":
            files, counts = {name: repositories(num, seed, name) for name, num in sizes.items()}, {}
        case "lake":
            files, counts = maps(sizes, config.num_sft_maps, seed), {}
        case _:
            raise ValueError(
                f"dataset.kind {config.kind!r} is unknown; "
                "it is arithmetic, gsm8k_calc, guess, lake, repositories, sql, squares or word_problems"
            )
    Path(config.folder).mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        write_json_lines(Path(config.folder) / f"{name}.jsonl", rows)
        counts[f"{name}.jsonl"] = len(rows)
    return counts


def _arithmetic(config: DatasetConfig, seed: int) -> tuple[dict[str, list[Row]], dict[str, int]]:
    """Returns sums and differences of 0..max_operand, and products with 0..12, drawn by index."""
    side = config.max_operand + 1
    factors = 0 if config.by_operation else min(side, _MAX_FACTOR + 1)
    total = side * side * 2 + side * factors
    wanted = config.num_sft + config.num_train + config.num_eval
    if wanted > total:
        raise ValueError(
            f"dataset: {wanted} problems wanted, "
            f"but operands up to {config.max_operand} (max_operand) give only {total}"
        )
    rows = [
        _problem(index, side, factors)
        for index in random.Random(f"arithmetic {seed}").sample(range(total), wanted)
    ]
    for row in rows if config.by_operation else ():
        row["operation"] = "addition" if "+" in row["prompt"] else "subtraction"
    files = {
        "eval": rows[: config.num_eval],
        "sft": [
            _called(row) if config.calculator else row
            for row in rows[config.num_eval : config.num_eval + config.num_sft]
        ],
        "train": rows[config.num_eval + config.num_sft :],
    }
    if config.by_operation:
        files |= {
            f"sft_{name}": [row for row in files["sft"] if row["operation"] == name]
            for name in ("addition", "subtraction")
        }
    return files, {"different problems": total}


def _called(row: Row) -> Row:
    """Returns the problem with an answer that calls the calculator and repeats its result."""
    return row | {"answer": f"<{row['prompt'].removesuffix('=')}>{row['answer']}={row['answer']}"}


def _problem(index: int, side: int, factors: int) -> Row:
    if index < 2 * side * side:
        minus, pair = divmod(index, side * side)
        a, b = divmod(pair, side)
        return {"prompt": f"{a}{'+-'[minus]}{b}=", "answer": str(a - b if minus else a + b)}
    a, b = divmod(index - 2 * side * side, factors)
    return {"prompt": f"{a}*{b}=", "answer": str(a * b)}


def _gsm8k_calc(config: DatasetConfig, seed: int) -> tuple[dict[str, list[Row]], dict[str, int]]:
    """Returns the calculator annotations <<48/2=24>> inside GSM8K's own solutions (Cobbe et al.
    2021).

    GRPO trains on those of its train split and is evaluated on those of its test split that the
    former lacks. The warm-up gets neither: its expressions are the train split's with other numbers
    of the train split put in.
    """
    if config.source is None:
        raise ValueError(
            "dataset.source is needed for gsm8k_calc: the folder with GSM8K's train.jsonl and "
            "test.jsonl"
        )
    reasons: Counter[str] = Counter()
    train = _expressions(Path(config.source) / "train.jsonl", config, reasons)
    test = _expressions(Path(config.source) / "test.jsonl", config, reasons)
    unseen = {expression: answer for expression, answer in test.items() if expression not in train}
    counts = {
        "different expressions in train": len(train),
        "different expressions in test": len(test),
        "of these also in train": len(test) - len(unseen),
        **{f"annotations dropped, {reason}": n for reason, n in sorted(reasons.items())},
    }
    if config.num_train > len(train) or config.num_eval > len(unseen):
        raise ValueError(
            f"dataset: num_train {config.num_train} and num_eval {config.num_eval} wanted, "
            f"but {config.source} has {len(train)} and {len(unseen)} different expressions"
        )
    files = {
        "eval": _shuffled_rows(unseen, seed)[: config.num_eval],
        "sft": _shuffled_rows(_recombined(train, train.keys() | test.keys(), config, seed), seed),
        "train": _shuffled_rows(train, seed)[: config.num_train],
    }
    return files, counts


def _recombined(
    train: dict[str, str], taken: Set[str], config: DatasetConfig, seed: int
) -> dict[str, str]:
    """Returns `num_sft` new expressions: forms and numbers of `train`, each as often as there, none
    of `taken`."""
    choose = random.Random(f"gsm8k_calc recombined {seed}")
    forms = list(train)
    numbers = [number for form in forms for number in _NUMBER.findall(form)]
    found: dict[str, str] = {}
    for _ in range(_MAX_TRIES * config.num_sft):
        if len(found) == config.num_sft:
            return found
        expression = _NUMBER.sub(lambda _: choose.choice(numbers), choose.choice(forms))
        answer = exact_value(expression)
        if expression not in taken and answer is not None and _fits(expression, answer, config):
            found[expression] = answer
    raise ValueError(
        f"dataset.num_sft {config.num_sft}: the source's numbers give only {len(found)} new "
        "expressions"
    )


def _fits(expression: str, answer: str, config: DatasetConfig) -> bool:
    return len(expression) <= config.max_expression and len(answer) <= config.max_answer


def _expressions(path: Path, config: DatasetConfig, reasons: Counter[str]) -> dict[str, str]:
    """Returns expression -> exact answer, in order of appearance; what is left out is counted in
    `reasons`."""
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; dataset.source is the folder with GSM8K's train.jsonl and "
            "test.jsonl"
        )
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            solution = json.loads(line)["answer"]
        except (json.JSONDecodeError, KeyError, TypeError) as exc:
            raise ValueError(
                f"{path}:{number}: not a GSM8K line with an 'answer': {type(exc).__name__}: {exc}"
            ) from exc
        for annotation in _ANNOTATION.findall(solution):
            expression, _, stated = annotation.replace(" ", "").rpartition("=")
            answer = exact_value(expression)
            if answer is None or exact_value(stated) != answer:
                reasons["unreadable or not exact"] += 1
            elif not re.search(r"\d[-+*/]|\)[-+*/]", expression):
                reasons["nothing to compute"] += 1
            elif set(expression) & _OPERATORS - set(config.operators):
                reasons["other operators"] += 1
            elif not _fits(expression, answer, config):
                reasons["too long"] += 1
            else:
                found[expression] = answer
    return found


def _shuffled_rows(expressions: dict[str, str], seed: int) -> list[Row]:
    rows = [
        {"prompt": f"{expression}=", "answer": answer} for expression, answer in expressions.items()
    ]
    random.Random(f"gsm8k_calc {seed}").shuffle(rows)
    return rows
