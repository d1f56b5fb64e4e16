"""data.curriculum: weights of rows in closed form, draws that depend on nothing else, what is refused,
and the steps of a loop."""

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from fake_service import FakeService, running
from sampling import MESH, experiment, source_of, take

from megagrpo.check.problems import preflight
from megagrpo.checkpoint import resume
from megagrpo.checkpoint import save as checkpoint
from megagrpo.checkpoint.save import PendingSave, RunIdentity
from megagrpo.config.load import dump_config
from megagrpo.config.schema import CheckpointConfig, CurriculumConfig, DataConfig, ExperimentConfig
from megagrpo.data.curriculum import Curriculum, describe_curriculum, load_curriculum
from megagrpo.data.prompts import PromptSet
from megagrpo.mesh import LeaderError
from megagrpo.monitor.metrics import Metrics
from megagrpo.types import Outcome, Prompt, RolloutGroup, RowResults, Sample, TrainState
from tests import experiments
from tests.curricula import NoActor, Steps, assert_left_out, continued, dropping, prompt_set, section

pytestmark = pytest.mark.verifies(
    "runs",
    "`data.curriculum`: weights in closed form, the same rows after a resume and on any ranks",
    "dist/test_curriculum_ranks.py",
)


def curriculum(number: int = 6, seed: int = 0, of: PromptSet | None = None, **options) -> Curriculum:
    of = of or prompt_set(number)
    return Curriculum(CurriculumConfig(**options), seed, of.prompts, of.mixture)


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
    first = Counter(made.draw(of, 5, place, 1)[0] for place in range(2000))
    assert first[2] == 0
    # 1/5, 3/5, 1/5 of 2000, five standard deviations
    assert abs(first[1] - 1200) < 110 and abs(first[0] - 400) < 90
    batches = [made.draw(of, 5, place, 3) for place in range(100)]
    assert all(sorted(batch) == [0, 1, 3] for batch in batches)
    assert len({tuple(batch) for batch in batches}) > 1


@pytest.mark.parametrize("weights", [[1, 1, 5e-324, 5e-324, 0, 0], [0] * 6])
def test_weights_too_far_apart_are_refused_by_name(weights, monkeypatch):
    made = curriculum(6, name="pools")
    monkeypatch.setattr(Curriculum, "_weights", lambda *_: numpy.array(weights, float))
    with pytest.raises(ValueError, match=r"data.curriculum pools: \d of 6 rows have a weight above 0"):
        made.draw(made.unseen(), 1, 0, 4)


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
        group(11, Outcome("error")),  # row 0 was drawn, and has no result
        group(13, score(0.5), score(-1.0), score(0.5)),
    ]
    after = made.recorded(of, [made.shown(of, 10, groups[:2]), made.shown(of, 10, groups[2:])], 7, 4)
    assert after == RowResults(
        last_step=[7, 7, 7, 0],
        times_seen=[0, 1, 2, 0],
        pass_rate=[0, 2 / 3, 0, 0],
        reward_mean=[0, 0, 0.125, 0],
        drawn=[3],
    )
    assert of == replace(made.unseen(), drawn=[2, 0, 2, 1, 3]), "a checkpoint may be writing it"
    assert made.pools(after).tolist() == [0, 2, 1, 0]


@pytest.mark.parametrize("name", ["pools", "drop_solved"])
def test_rows_without_a_score_do_not_fill_the_batches(name):
    """prime-rl 3266: rows that always fail stayed unseen, and 10 % of the rows became 45 % of the draws."""
    made = curriculum(100, name=name)
    of, drawn = made.unseen(), Counter[bool]()
    for step in range(60):
        rows = made.draw(of, step + 1, 8 * step, 8)
        groups = [
            group(8 * step + i, Outcome("error") if row < 10 else score(float(row % 2))) for i, row in enumerate(rows)
        ]
        of = made.recorded(
            replace(of, drawn=rows), [made.shown(replace(of, drawn=rows), 8 * step, groups)], step + 1, 8
        )
        drawn.update(row < 10 for row in rows)
    assert drawn[True] < 0.1 * drawn.total() and drawn[True] >= 10


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
        Curriculum.of(config, prompt_set(6).prompts)


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
        "by pools(unseen 1, hard 0.5, medium 1, easy 0.0), p = fraction of rewards >= 1; hard p <= 0, easy p >= 0.75"
    )


def test_preflight_loads_the_function_and_a_record_has_its_digest(own, tmp_path):
    wrong = experiment(data=section(name=f"{own}:goods"))
    found = [text for text in preflight(wrong) if "curriculum" in text]
    assert len(found) == 1 and "no function goods; did you mean 'good'?" in found[0]
    dump_config(experiment(data=section(name=f"{own}:good")), tmp_path / "config.yaml")
    digest = hashlib.sha256(OWN.encode()).hexdigest()
    record = f"# data.curriculum.name: {own}:good, sha256 {digest}"
    assert record in (tmp_path / "config.yaml").read_text()


def test_results_are_not_of_other_rows(tmp_path, monkeypatch):
    rows = [["a.jsonl", 4, "a4"]]
    state = TrainState(step=3, curriculum=results([None, 1.0, 0.5, 0.0]))
    surplus = [RolloutGroup(0, Prompt(0, "text", [1, 2], "4"), (Sample(0, [5], [-0.5], "stop", 3, "5"),), ())]
    saved = replace(state, surplus=surplus)
    folder = PendingSave(
        tmp_path / "checkpoints", saved, RunIdentity({}, {}, rows), CheckpointConfig(), NoActor, MESH
    ).finish()
    load = lambda *_: checkpoint.load(folder, RunIdentity({}, {}), lambda part: None, MESH)  # noqa: E731
    monkeypatch.setattr(resume, "load_checkpoint", load)
    config = experiments.experiment(
        output_dir=str(tmp_path), checkpoint={"resume": "other_data"}, algorithm={"dynamic_sampling": {}}
    )
    actor = SimpleNamespace(mesh=MESH)
    assert resume.resume(config, folder, RunIdentity({}, {}, rows), actor) == saved
    other = resume.resume(config, folder, RunIdentity({}, {}, [["a.jsonl", 5, "a5"]]), actor)
    assert other.curriculum is None and other.surplus == [], "nor are groups, with answers that the data had"


def test_bytes_of_a_row_in_a_checkpoint(tmp_path):
    sizes = []
    for number in (1000, 3000):
        state = TrainState(step=number, curriculum=results([0.5] * number))
        folder = PendingSave(tmp_path, state, RunIdentity({}, {}), CheckpointConfig(), NoActor, MESH).finish()
        sizes.append(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    assert (sizes[1] - sizes[0]) / 2000 == pytest.approx(24, abs=0.1)


# ---- the steps of a loop -----------------------------------------------------------------------

STEPS = 6


def steps_of(folder: Path, config: ExperimentConfig, *ends: int) -> Steps:
    """The steps of a run that stops, is saved and goes on after each of `ends`."""
    with running(FakeService()) as service:
        parts = [continued(MESH, service.url, folder, config, end) for end in ends]
    return [step for part in parts for step in part]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_solved_rows_are_not_drawn_and_a_resumed_run_draws_the_same(tmp_path, staleness):
    whole = steps_of(tmp_path / "whole", dropping(staleness), STEPS)
    assert_left_out(whole, staleness)
    for stop_after in (1, 4):
        assert steps_of(tmp_path / str(stop_after), dropping(staleness), stop_after, STEPS) == whole


def test_batches_of_dynamic_sampling_and_of_remax_are_drawn_the_same_after_a_resume(tmp_path):
    """A step takes several batches, and starts the later ones when it has taken its own."""
    config = dropping(2, dynamic_sampling={}, advantage={"name": "remax"})
    whole = steps_of(tmp_path / "whole", config, STEPS)
    assert not any(solved for step in whole for _, solved in step)
    for stop_after in (1, 3):
        assert steps_of(tmp_path / str(stop_after), config, stop_after, STEPS) == whole


def test_a_used_up_curriculum_stops_the_run_and_its_state_is_kept():
    config = experiment(data=section(name="drop_solved"))
    state = TrainState()
    with running(FakeService()) as service:
        source = source_of(service.control, config, decode=lambda ids: "1")
        for step in range(2):
            take(source, state, of=prompt_set(5))
            service.version = step + 1
        before = replace(state)
        said = "draw rows: ValueError: data.curriculum drop_solved: 1 of 5 rows .* lower return_after"
        with pytest.raises(LeaderError, match=said):
            take(source, state, of=prompt_set(5))
        source.close()
    assert state == before and state.curriculum.times_seen.sum() == 4


def test_metrics_by_pool():
    config = experiment(data=section(name="pools"))
    state = TrainState()
    with running(FakeService()) as service:
        source = source_of(service.control, config, decode=lambda ids: f"{ids[-1] % 2}")
        numbers = []
        for step in range(STEPS):
            metrics = Metrics()
            results = state.curriculum
            groups = take(source, state, of=prompt_set(3), metrics=metrics).groups
            numbers.append(metrics.reduced(MESH.reduce))
            service.version = step + 1
        source.close()
    first, last = numbers[0], numbers[-1]
    assert (first["curriculum/unseen_rows"], first["curriculum/unseen_fraction"]) == (3, 1)
    for pool, fits in {
        "unseen": lambda row: results.times_seen[row] == 0,
        "hard": lambda row: results.times_seen[row] and results.pass_rate[row] == 0,
        "medium": lambda row: 0 < results.pass_rate[row] < 1,
        "easy": lambda row: results.pass_rate[row] == 1,
    }.items():
        of_pool = [g for g in groups if fits(g.prompt.id // 3)]
        assert last[f"curriculum/{pool}_rows"] == sum(map(bool, map(fits, range(3))))
        assert last[f"curriculum/{pool}_fraction"] == len(of_pool) / 2
        scores = [o.value for g in of_pool for o in g.outcomes]
        if scores:
            assert last[f"curriculum/{pool}_reward_mean"] == sum(scores) / len(scores)


def test_the_names_of_sources_are_read_once():
    """Every step asks for them; reading a million prompts from the disk takes a minute."""

    class Prompts(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    prompts = PromptSet(Prompts([Prompt(0, "1+1=", [1], "2", source="sums")]), 0, shuffle=False)
    assert [prompts.sources, prompts.sources] == [["sums"], ["sums"]]
    assert prompts.prompts.passes == 1
