"""How a start ends, by the real loop on two ranks: finished steps are saved and recorded whatever ended it, the next
starts make the undisturbed run of it, and a record whose checkpoints are gone stays."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.check.problems import finished, preflight
from megagrpo.checkpoint.folder import finished_checkpoints, step_of
from megagrpo.config.schema import ExperimentConfig
from megagrpo.monitor.step_log import read_metrics
from megagrpo.system.stop_request import StopRequest
from megagrpo.tools.evaluate import evaluation_alone
from megagrpo.tools.report import write_report
from tests.dist.cases import SMALL
from tests.dist.workers.launch import run_ranks
from tests.fake_service import FakeService, running

NUM_STEPS = 4
REPEATED = ("loss/total", "optim/grad_norm", "optim/lr", "reward/mean", "eval/accuracy")


@dataclass
class Service(FakeService):
    """Refuses requests of evaluations from the weights of version `refuses` on, or asks the run to
    stop and does not answer them."""

    refuses: int = 100
    asks: int = 100
    request: StopRequest | None = None
    asked: bool = field(default=False, init=False)

    async def generate(self, request: web.Request) -> web.Response:
        evaluates = (await request.json())["sampling_params"]["temperature"] == 0
        if evaluates and self.version >= self.refuses:
            return web.Response(status=400, text="on purpose")
        if evaluates and self.version >= self.asks:
            self.request.make()
            self.asked = True
        return await super().generate(request)


class Runs:
    """Starts of an experiment; each run has a folder of its own."""

    def __init__(self, folder: Path):
        self.folder, self.starts = folder, 0
        self.model = str(folder / "model")
        make_tiny_model(TinyModelConfig(path=self.model, family="qwen3", **SMALL), 0)
        rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
        for name, part in (("train", rows), ("eval", rows[:3])):
            (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
        (folder / "gr.py").write_text("def grade(text, answer):\n    return sum(map(ord, text)) % 2.0\n")

    def experiment(self, name: str, **sections) -> dict:
        base = {
            "name": name,
            "output_dir": str(self.folder / name),
            "model": {"path": self.model},
            "data": {"path": str(self.folder / "train.jsonl"), "max_prompt_tokens": 8},
            "eval": {"data": {"path": str(self.folder / "eval.jsonl")}, "every": 2},
            "sampling": {"max_response_tokens": 8},
            "reward": {"grader": f"{self.folder}/gr.py:grade", "workers": 1},
            "train": {"num_steps": NUM_STEPS, "num_prompts_per_step": 4, "group_size": 2, "num_updates_per_step": 2},
            "algorithm": {"loss": {"name": "ppo_clip"}, "mismatch": {"alarm": None}},
            "actor": {"world_size": 2, "threads": 1, "optimizer": {"lr": 1e-3, "lr_schedule": "linear"}},
            "rollout": {"step_timeout_s": 240},
            "checkpoint": {"every": 25},
            "log": {"tensorboard": False},
        }
        return {key: {**value, **sections.get(key, {})} if isinstance(value, dict) else value
                for key, value in base.items()}  # fmt: skip

    def start(self, name: str, fails: int = -1, refuses: int = 100, asks: int = 100, alone: bool = False, **sections):
        """What the two ranks of a start say. alone: it is an evaluation alone."""
        experiment = self.experiment(name, **sections)
        if alone:
            experiment = evaluation_alone(ExperimentConfig.model_validate(experiment)).model_dump(mode="json")
        request = StopRequest(self.folder / f"{name}.stop_request")
        request.withdraw()
        request.listen(True)  # as ranks do that are restarted
        service = Service(refuses=refuses, asks=asks, request=request)
        service.hang = lambda body: service.asked
        with running(service):
            job = {"experiment": experiment, "url": service.url}
            job |= {"fails": fails, "stop_file": str(self.folder / f"{name}.stop_request")}
            said = self.ranks(job)
        return said | {"granted": request.granted(), "listened": request.listened()}

    def ranks(self, job: dict) -> dict:
        self.starts += 1
        (said,) = run_ranks(2, self.folder / f"ranks{self.starts}", [job], script="loop_ranks.py")
        return said

    def saved(self, name: str) -> list[int]:
        return [step_of(path) for path in finished_checkpoints(self.folder / name / "checkpoints")]

    def record(self, name: str) -> dict[int, dict]:
        """What is the same in every run of these steps, from metrics.jsonl; the samples' files."""
        folder = ExperimentConfig.model_validate(self.experiment(name)).run_folder
        samples = folder.rollout_files()
        return {
            entry["step"]: {name: entry.get(name) for name in REPEATED}
            | {"samples": [path.read_text() for path in samples.get(entry["step"], {}).values()]}
            for entry in read_metrics(folder)
        }

    def finished(self, name: str) -> str:
        return finished(ExperimentConfig.model_validate(self.experiment(name)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("loop"))


@pytest.fixture(scope="module")
def undisturbed(runs) -> dict:
    said = runs.start("undisturbed")
    assert said["error"] == "" and runs.saved("undisturbed") == [NUM_STEPS]
    assert len(set(said["published"].values())) == NUM_STEPS + 1, "every step changes the weights"
    return said


def test_an_evaluation_that_fails_or_is_stopped_costs_no_step(runs, undisturbed):
    """Neither its steps, nor their record, nor itself: the next start evaluates."""
    name = "evaluation"
    said = runs.start(name, refuses=2)
    assert "on purpose" in said["error"] and runs.saved(name) == [2]
    assert sorted(runs.record(name)) == [0, 1, 2] and said["listened"]
    said = runs.start(name, data={"shuffle": False})
    assert "data.shuffle was True and is False now" in said["error"] and runs.saved(name) == [2]
    said = runs.start(name, asks=2)
    assert not said["listened"], "no step has begun"
    assert (said["error"], said["published"]) == ("", {"2": undisturbed["published"]["2"]})
    assert said["granted"][0] == "saved after step 2" and runs.saved(name) == [2]
    said = runs.start(name, asks=4)
    assert said["granted"][0] == "saved after step 4" and runs.saved(name) == [2, 4]
    assert said["published"].items() <= undisturbed["published"].items()
    assert runs.finished(name) == "", "the last evaluation is left"
    assert runs.start(name)["error"] == ""
    assert f"{NUM_STEPS} of {NUM_STEPS} steps are done" in runs.finished(name)
    assert runs.record(name) == runs.record("undisturbed")
    starts = sorted(path.name for path in (runs.folder / name / "starts").iterdir())
    assert starts == ["step_000000.yaml", "step_000002.yaml", "step_000004.yaml"]


def test_the_evaluation_before_the_first_step_may_be_left_out(runs, undisturbed):
    name = "unevaluated"
    evaluation = runs.experiment(name)["eval"] | {"before_first_step": False}
    assert runs.start(name, eval=evaluation)["published"] == undisturbed["published"]
    evaluated = [step for step, entry in runs.record(name).items() if entry["eval/accuracy"] is not None]
    assert evaluated == [2, 4], "the model's own is missing, that after the last step is not"


def test_an_evaluation_alone_takes_the_newest_checkpoint_and_leaves_the_run_as_it_is(runs, undisturbed):
    before = runs.record("undisturbed")
    for _ in range(2):  # a second one replaces the first one's record
        said = runs.start("undisturbed", alone=True)
        assert said["error"] == "" and said["published"] == {"0": undisturbed["published"]["4"]}
        folder = "undisturbed/evaluations/step_000004"
        assert runs.record(folder)[0]["eval/accuracy"] == before[4]["eval/accuracy"]
        assert list(runs.record(folder)) == [0] and runs.saved(folder) == []
    assert "held-out accuracy" in write_report(str(runs.folder / folder))
    assert runs.record("undisturbed") == before and runs.saved("undisturbed") == [NUM_STEPS]


def test_an_evaluation_alone_of_the_model_itself(runs, undisturbed):
    said = runs.start("untrained", alone=True)
    assert said["error"] == "" and said["published"] == {"0": undisturbed["published"]["0"]}
    assert list(runs.record("untrained/evaluations/start")) == [0]
    config = ExperimentConfig.model_validate(runs.experiment("untrained"))
    with pytest.raises(ValueError, match="no section eval"):
        evaluation_alone(config.model_copy(update={"eval": None}))


def test_hugging_face_folders_are_the_weights_of_their_steps(runs, undisturbed):
    name, checkpoints = "exports", runs.folder / "exports" / "checkpoints"
    options = {"every": 1, "hf_every": 2, "keep": 2}
    assert runs.start(name, fails=3, checkpoint=options)["error"]
    assert sorted(path.name for path in checkpoints.glob("*hf_*")) == ["hf_000002"] and runs.saved(name)[-1] == 3
    assert runs.start(name, checkpoint=options)["error"] == ""
    assert sorted(path.name for path in checkpoints.glob("*hf_*")) == ["hf_000002", "hf_000004"]
    for step in ("2", "4"):
        model = {"path": str(checkpoints / f"hf_00000{step}")}
        said = runs.start(f"of_{step}", alone=True, model=model)
        assert said["published"] == {"0": undisturbed["published"][step]}


def test_a_publish_that_fails_costs_no_step(runs, undisturbed):
    name = "publish"
    said = runs.start(name, fails=3)
    assert "no engine took the weights" in said["error"] and runs.saved(name) == [3]
    said = runs.start(name)
    assert said["published"].items() <= undisturbed["published"].items()
    assert runs.record(name) == runs.record("undisturbed")


def test_a_record_whose_checkpoint_is_gone_is_refused_and_one_without_is_kept(runs):
    name = "gone"
    folder = runs.folder / name
    runs.start(name, train={"num_steps": 2})
    before = runs.record(name)
    (folder / "checkpoints").rename(runs.folder / "moved")
    said = runs.start(name)
    words = f"output_dir {folder} has the record of 2 steps, but step_000002, "
    assert words in said["error"] and str(folder / "checkpoints") in said["error"]
    assert "or correct checkpoint.dir" in said["error"] and runs.record(name) == before
    config = ExperimentConfig.model_validate(runs.experiment(name))
    assert any(words in problem for problem in preflight(config)), "before anything starts"
    (folder / "last_checkpoint").unlink()  # as the message says: it is lost
    said = runs.start(name, train={"num_steps": 1})
    assert said["error"] == "" and sorted(runs.record(name)) == [0, 1]
    (aside,) = folder.glob("unsaved_*")
    assert runs.record(f"{name}/{aside.name}") == before


def test_the_learning_rate_reaches_its_end_also_with_fewer_updates_a_step(runs):
    name = "fewer"
    runs.start(name, train={"num_steps": 3})
    said = runs.start(name, train={"num_steps": 6, "num_updates_per_step": 1})
    rates = [entry["optim/lr"] for step, entry in runs.record(name).items() if step > 3]
    assert rates[0] > rates[1] > rates[2] == 0.0
    assert len(set(said["published"].values())) == 3, "of steps 3, 4, and 5"


def test_the_first_step_after_another_runs_checkpoint_is_replayed_from_it(runs, undisturbed):
    name = "loaded"
    source = runs.folder / "undisturbed" / "checkpoints" / f"step_{NUM_STEPS:06d}"
    sections = {"checkpoint": {"load": str(source)}, "log": {"dump_steps": [1]}, "train": {"num_steps": 2}}
    said = runs.start(name, asks=1, **sections)
    assert said["error"] == "" and said["published"]["0"] == undisturbed["published"][str(NUM_STEPS)]
    for folder in (runs.folder / name / "checkpoints").glob("step_*"):
        shutil.rmtree(folder)  # as if it had failed in its first step
    dump = str(runs.folder / name / "dumps" / "step_000001")
    table = runs.ranks({"experiment": runs.experiment(name, **sections), "replay": dump})["table"]
    heading, _, *rows = table.splitlines()
    assert heading == f"weights of version 0 ({source})"
    repeated = {row.split()[0]: row.split()[1:] for row in rows}
    assert len(repeated["loss/total"]) == 2, table
    for metric, (then, now) in repeated.items():
        assert then == now or metric.startswith(("time/", "perf/", "schedule/")), metric
