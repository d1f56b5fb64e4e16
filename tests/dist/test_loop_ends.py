"""How a start ends, by the real loop on two ranks: finished steps are saved and recorded whatever ended it, the next
starts make the undisturbed run of it, and a record whose checkpoints are gone stays."""

import json
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

    def start(self, name: str, fails: int = -1, refuses: int = 100, asks: int = 100, **sections):
        """What the two ranks of a start say."""
        request = StopRequest(self.folder / f"{name}.stop_request")
        request.withdraw()
        service = Service(refuses=refuses, asks=asks, request=request)
        service.hang = lambda body: service.asked
        with running(service):
            job = {"experiment": self.experiment(name, **sections), "url": service.url}
            job |= {"fails": fails, "stop_file": str(self.folder / f"{name}.stop_request")}
            self.starts += 1
            folder = self.folder / f"ranks{self.starts}"
            (said,) = run_ranks(2, folder, [job], script="loop_ranks.py")
        return said | {"granted": request.granted()}

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
    assert sorted(runs.record(name)) == [0, 1, 2]
    said = runs.start(name, asks=2)
    assert (said["error"], said["published"]) == ("", {"2": undisturbed["published"]["2"]})
    assert said["granted"][0] == "saved after step 2" and runs.saved(name) == [2]
    said = runs.start(name, asks=4)
    assert said["granted"][0] == "saved after step 4" and runs.saved(name) == [2, 4]
    assert said["published"].items() <= undisturbed["published"].items()
    assert runs.finished(name) == "", "the last evaluation is left"
    assert runs.start(name)["error"] == ""
    assert f"{NUM_STEPS} of {NUM_STEPS} steps are done" in runs.finished(name)
    assert runs.record(name) == runs.record("undisturbed")


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
