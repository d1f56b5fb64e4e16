"""data.curriculum: weights of rows in closed form, draws that depend on nothing else, what is refused,
and the steps of a loop."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_service import FakeService, running
from sampling import MESH, digits, experiment, source_of, take

from megagrpo.checkpoint import resume as resuming
from megagrpo.checkpoint import save as checkpoint
from megagrpo.checkpoint.save import PendingSave, RunIdentity
from megagrpo.config.schema import CheckpointConfig, CurriculumConfig, DataConfig
from megagrpo.data.curriculum import Curriculum, describe_curriculum, load_curriculum
from megagrpo.data.prompts import PromptSet
from megagrpo.mesh import LeaderError
from megagrpo.monitor.metrics import Metrics
from megagrpo.types import Outcome, Prompt, RolloutGroup, RowResults, TrainState

pytestmark = pytest.mark.verifies(
    "runs",
    "`data.curriculum`: weights in closed form, the same rows after a resume and on any ranks",
    "dist/test_selection.py",
)

ANY = RunIdentity({}, {})


def prompt_set(number: int, **of) -> PromptSet:
    prompts = [
        Prompt(3 * i, "", (1, 100 + i), "", location=f"rows.jsonl:{i + 1}") for i in range(number)
    ]
    return PromptSet(tuple(prompts), 0, True, **of)


def curriculum(number: int = 6, seed: int = 0, of: PromptSet | None = None, **options) -> Curriculum:
    return Curriculum(CurriculumConfig(**options), of or prompt_set(number), seed)


def section(**options) -> dict:
    return {"path": "rows.jsonl", "curriculum": options}


def results(pass_rates: list[float | None], last_step: int = 4) -> RowResults:
    """Rows whose last groups had these pass rates; None: a row had none."""
    seen = [rate is not None for rate in pass_rates]
    rates = [rate or 0.0 for rate in pass_rates]
    steps = [last_step * each for each in seen]
    return RowResults(steps, seen, rates, rates, drawn=[])


def weights_of(made: Curriculum, of: RowResults, step: int) -> list[float]:
    return made._weights(of, step).tolist()


def test_pools_weigh_rows_by_their_last_pass_rate():
    rates = [None, 0.0, 0.1, 0.3, 0.5, 0.9, 1.0]
    args = {"unseen": 3.0, "hard": 0.5, "medium": 2.0, "easy": 0.0}
    made = curriculum(7, name="pools", args=args, hard_at_most=0.1, easy_at_least=0.9)
    assert weights_of(made, results(rates), 5) == [3.0, 0.5, 0.5, 2.0, 2.0, 0.0, 0.0]
    assert weights_of(curriculum(7, name="pools"), results(rates), 5) == [1, 0.5, 1, 1, 1, 1, 0.1]


@pytest.mark.parametrize("step, left_out", [(5, [1, 3]), (13, [1, 3]), (14, [])])
def test_solved_rows_are_left_out_and_come_back(step, left_out):
    made = curriculum(4, name="drop_solved", args={"return_after": 10})
    weights = weights_of(made, results([None, 1.0, 0.9, 1.0]), step)
    assert weights == [float(row not in left_out) for row in range(4)]


def test_rows_are_drawn_in_proportion_and_never_twice_in_a_batch():
    made = curriculum(4, name="pools", args={"hard": 1.0, "medium": 3.0, "easy": 0.0})
    of = results([0.0, 0.5, 1.0, 0.0])
    first = Counter(made.draw(of, 5, place, 1)[0] for place in range(4000))
    assert first[2] == 0
    # 1/5, 3/5, 1/5 of 4000, five standard deviations
    assert abs(first[1] - 2400) < 155 and abs(first[0] - 800) < 127
    batches = [made.draw(of, 5, place, 3) for place in range(100)]
    assert all(sorted(batch) == [0, 1, 3] for batch in batches)
    assert len({tuple(batch) for batch in batches}) > 1


def test_a_draw_depends_on_seed_place_and_results_only():
    made = curriculum(50, name="pools")
    of = results([None] * 25 + [0.5] * 25)
    assert made.draw(of, 5, 8, 8) == curriculum(50, name="pools").draw(of, 5, 8, 8)
    others = [
        curriculum(50, seed=1, name="pools").draw(of, 5, 8, 8),
        made.draw(of, 5, 16, 8),
        made.draw(results([0.0] * 25 + [1.0] * 25), 5, 8, 8),
    ]
    assert made.draw(of, 5, 8, 8) not in others
    assert made.draw(of, 5, 8, 8) == [40, 29, 49, 41, 27, 1, 47, 26], "a release keeps a run's rows"


def test_ratios_of_sources_hold():
    of = prompt_set(12, mixture=((3.0, 4), (1.0, 8)))
    made = curriculum(of=of, name="pools", args={"unseen": 0.0, "medium": 1.0})
    rows = made.draw(results([0.5] * 4 + [None] * 4 + [0.5] * 4), 5, 0, 4)
    assert sorted(row < 4 for row in rows) == [False, True, True, True]
    assert all(row < 4 or row >= 8 for row in rows)


def group(group_id: int, *outcomes: Outcome) -> RolloutGroup:
    return RolloutGroup(group_id, Prompt(0, "", (1,), ""), (), outcomes)


def score(value: float) -> Outcome:
    return Outcome("score", value)


def test_what_groups_show_is_kept_by_row():
    made = curriculum(4, name="pools", pass_reward=0.5)
    of = replace(made.unseen(), drawn=[2, 0, 2, 1, 3])
    groups = [
        group(12, score(0.25), score(0.0)),  # row 2 again: the later group counts
        group(10, score(1.0), score(0.5), Outcome("timeout")),
        group(11, Outcome("error")),  # shows nothing
        group(13, score(0.5), score(-1.0), score(0.5)),
    ]
    after = made.recorded(of, made.results_of(groups), 7, 10, 4)
    assert after == RowResults(
        last_step=[0, 7, 7, 0],
        times_seen=[0, 1, 2, 0],
        pass_rate=[0, 2 / 3, 0, 0],
        reward_mean=[0, 0, 0.125, 0],
        drawn=[3],
    )
    assert of == replace(made.unseen(), drawn=[2, 0, 2, 1, 3]), "a checkpoint may be writing it"
    assert made.pools(after).tolist() == [0, 2, 1, 0]


OWN = """
import numpy as np

def good(rows, medium=1.0):
    rows.times_seen[:] = 9  # of a copy
    return list(np.where(np.isnan(rows.pass_rate), rows.ids, medium) + (rows.sources == "a"))

def short(rows):
    return [1.0]

def negative(rows):
    return np.where(rows.ids == 6, -1.0, 1.0)

def unseen_is_nan(rows):
    return 1 - rows.pass_rate

def words(rows):
    return ["often"] * len(rows.ids)

def raises(rows):
    return rows.pas_rate

def nothing(rows):
    return np.zeros(len(rows.ids))
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(OWN)
    return f"{tmp_path / 'mine.py'}"


def test_an_own_function_gets_ids_sources_and_results(own):
    made = curriculum(3, name=f"{own}:good", args={"medium": 5.0})
    of = results([None, 0.5, None])
    assert weights_of(made, of, 5) == [0.0, 5.0, 6.0] and of.times_seen.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "name, said",
    [
        ("short", r"mine.py:short' returns a weight for each row in use, \[6\]; it returned \[1\]"),
        ("negative", "mine.py:negative' returned -1.0 for rows.jsonl:3 .*at least 0"),
        ("unseen_is_nan", "returned nan for rows.jsonl:1 .*pass_rate is NaN until a row has a group"),
        ("words", r"returns a weight for each row in use, \[6\]; it failed: ValueError: could not"),
        ("raises", "it failed: AttributeError: .*pas_rate"),
        ("nothing", "0 of 6 rows have a weight above 0, step 1 draws 2; change data.curriculum.args"),
    ],
)
def test_a_wrong_function_is_one_message_before_the_first_step(own, name, said):
    config = experiment(data=section(name=f"{own}:{name}"))
    with pytest.raises(ValueError, match=rf"data.curriculum.*{said}"):
        Curriculum.of(config, prompt_set(6))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"name": "pool"}, "data.curriculum.name 'pool' is unknown; did you mean 'pools'?"),
        ({"name": "pools", "args": {"esy": 1}}, "data.curriculum.args do not fit .*mean 'easy'"),
    ],
)
def test_unknown_names_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        load_curriculum(CurriculumConfig(**options))


def test_what_cannot_be_combined_is_refused():
    with pytest.raises(ValueError, match="num_epochs with data.curriculum.*train.num_steps"):
        experiment(data=section(name="pools"), train={"num_epochs": 2, "num_steps": None})
    with pytest.raises(ValueError, match="curriculum draws rows by chance, shuffle: false"):
        DataConfig(**section(name="pools"), shuffle=False)
    with pytest.raises(ValueError, match="hard_at_most 0.5 is not below easy_at_least 0.5"):
        CurriculumConfig(name="pools", hard_at_most=0.5, easy_at_least=0.5)


def test_check_says_the_formula():
    options = CurriculumConfig(name="pools", args={"easy": 0.0}, easy_at_least=0.75)
    assert describe_curriculum(options) == (
        "drawn by pools(unseen 1.0, hard 0.5, medium 1.0, easy 0.0); pass rate p of a row's last "
        "group: rewards >= 1; hard: p <= 0, easy: p >= 0.75"
    )


# ---- the steps of a loop -----------------------------------------------------------------------

STEPS = 6


class NoActor:
    """The plan of a checkpoint that holds no weights."""

    reshardable = True

    def write(self) -> dict:
        return {}

    def finish(self) -> None:
        pass


def saved_and_loaded(folder: Path, state: TrainState, source) -> TrainState:
    whole = replace(state, ahead=source.finished())
    saved = PendingSave(folder, whole, ANY, CheckpointConfig(), lambda _: NoActor(), MESH).finish()
    return checkpoint.load(saved, ANY, lambda _: None, MESH)


def rows_of_steps(folder: Path, config, stop_after: int = STEPS) -> list[list[int]]:
    """The rows of every step; after `stop_after` the state is saved, and another source goes on."""
    prompts, steps, state = prompt_set(12), [], TrainState()
    while state.step < STEPS:
        end = stop_after if state.step < stop_after else STEPS
        with running(FakeService(version=state.step)) as service:
            source = source_of(service.control, config, decode=lambda ids: f"{ids[-1] % 2}")
            source.restore(state.ahead)
            while state.step < end:
                # a run that was to end at `end` samples nothing for the steps after it
                taken = take(source, config, state, end - state.step, of=prompts)
                steps.append([each.prompt.id // 3 for each in taken.groups])
                source.drain()
                service.version = state.step
            if end < STEPS:
                state = saved_and_loaded(folder, state, source)
            source.close()
    return steps


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_resumed_run_draws_the_same_rows(tmp_path, staleness):
    config = experiment(
        data=section(name="drop_solved", args={"return_after": 3}),
        rollout={"max_staleness": staleness},
        algorithm={"mismatch": {"weight": {"name": "tis"}} if staleness else {}},
    )
    whole = rows_of_steps(tmp_path, config)
    for stop_after in (1, 4):
        assert rows_of_steps(tmp_path / str(stop_after), config, stop_after) == whole
