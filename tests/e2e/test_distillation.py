"""The whole loop with teachers: two by a column, demonstrations beside rewards, and killed and run
again it is the same run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from run_megagrpo import PREPARE, RECIPE, assert_killed_run_is_the_same, metrics, run_experiment, write_experiment

pytestmark = pytest.mark.verifies(
    "runs", "`teachers`, streams and demonstrations, also with `max_staleness` 1: killed and run again"
)
STEPS = 4


@pytest.fixture(scope="module")
def inputs(experiments: Path) -> dict:
    """Data whose rows name a teacher, or both or none; one teacher is the student as it starts, the
    other a stranger."""
    rows = list(map(json.loads, (experiments / "data" / "train.jsonl").read_text().splitlines()))
    names = ("start", "other", {"start": 0.3, "other": 0.7}, None)
    told = [row | {"teacher": names[i % 4], "shown": row["answer"]} for i, row in enumerate(rows)]
    file = experiments / "with_teachers.jsonl"
    file.write_text("\n".join(map(json.dumps, told)) + "\n")
    other = experiments / "other"
    recipe = other.with_suffix(".recipe")
    recipe.write_text(json.dumps({"model": RECIPE["model"]}))
    config = write_experiment(experiments / "of_other", model={"path": str(other)}, seed=1)
    command = [sys.executable, "-W", "ignore", str(PREPARE), str(config), "--recipe", str(recipe)]
    subprocess.run(command, check=True)
    return {
        "data": {"path": str(file), "teacher_key": "teacher", "demonstration_key": "shown"},
        "teachers": {"start": {"path": str(experiments / "model")}, "other": {"path": str(other)}},
        "train": {"num_steps": STEPS},
        "checkpoint": {"every": 1, "keep": 20},
    }


def algorithm(loss: str) -> dict:
    return {
        "distillation": {"loss": loss} | ({} if loss == "reverse_kl" else {"top_k": 4}),
        "streams": [
            {"component": "cross_entropy", "weight": 0.1, "written_by": ["data"]},
            {"component": "reference_kl", "weight": 0.01},
        ],
        "mismatch": {"weight": {"name": "tis"}},
    }


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "staleness"), [("reverse_kl", 0), ("student_topk", 1)])
def test_killed_with_teachers_and_run_again_it_is_the_same_run(
    experiments: Path, inputs: dict, loss: str, staleness: int
):
    sections = inputs | {
        "algorithm": algorithm(loss),
        "rollout": {"deterministic": True, "max_staleness": staleness},
        "weights": {"in_flight": "drain"},
    }
    whole = experiments / f"distilled-{staleness}"
    run_experiment(whole, **sections)
    entries = metrics(whole)
    for step in range(1, STEPS + 1):
        entry = entries[step]
        assert entry["loss/total"] == pytest.approx(sum(entry[f"loss/{name}"] for name in LOSSES), rel=1e-5, abs=1e-6)
        # of 8 prompts two have no teacher; each has a demonstration, of its answer and the end
        assert 0 < entry["stream/distillation_tokens"] < entry["stream/reference_kl_tokens"]
        assert entry["stream/cross_entropy_tokens"] >= 2 * 8
        if not staleness:  # else scores are of responses to later steps
            assert entry["teachers/tokens"] == entry["stream/distillation_tokens"]
    assert entries[STEPS]["stream/distillation_kl"] > 1e-3

    folder = experiments / f"distilled-{staleness}-resumed"
    assert_killed_run_is_the_same(folder, whole, STEPS, kill_after=2, middle=2, **sections)


LOSSES = ("policy", "distillation", "cross_entropy", "reference_kl")
