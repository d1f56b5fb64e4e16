"""Metrics are combined as they say, whatever the number of ranks; files survive crashes and resumes."""

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megagrpo.actor.step import _optimizer_metrics
from megagrpo.actor.timing import mfu
from megagrpo.algo.statistics import alone
from megagrpo.config.schema import DataConfig, LogConfig, TrainConfig
from megagrpo.data.prompts import PromptSet
from megagrpo.data.rows import read_rows
from megagrpo.loop.evaluation import evaluation_metrics
from megagrpo.loop.run import _refuse_other_rows
from megagrpo.mesh import Mesh, RunStopped
from megagrpo.models.table import architecture_of, training_flops
from megagrpo.monitor.metrics import Metrics, StepTimer
from megagrpo.monitor.rollout_log import RolloutLog, read_rollouts
from megagrpo.monitor.run_record import RunRecord, cut_record
from megagrpo.monitor.step_log import StepLog, read_metrics
from megagrpo.rollout.group_metrics import by_source, rollout_metrics
from megagrpo.rollout.source import Inputs
from megagrpo.system.run_folder import RunFolder, whole_folder, write_whole
from megagrpo.tools.plan.work import model_work
from megagrpo.tools.ranks.start import latest_checkpoint
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample
from tests.experiments import ROOT, experiment

FILES_ONLY = LogConfig(tensorboard=False)


def test_half_a_character_is_written_as_json_escapes_it(tmp_path):
    said = {"detail": "cut \ud83d", "more": "\U0001f600"}
    write_whole(tmp_path / "whole.json", json.dumps(said, ensure_ascii=False))
    assert json.loads((tmp_path / "whole.json").read_text()) == said


def test_every_reduction_over_calls():
    metrics, weight = Metrics(), torch.ones(2, requires_grad=True)  # no value keeps a graph
    for numerator, denominator in ((6.0, 2), (torch.tensor(1.0), torch.tensor(2))):
        metrics.add_mean("loss/total", numerator, denominator)
    metrics.add_mean("reward/of_nothing", 0.0, 0.0)  # left out
    for tokens in (3, torch.tensor([4]).sum(), weight.sum()):
        metrics.add_sum("batch/tokens", tokens)
    for value in (2.0, -5.0, weight.max()):
        metrics.add_max("moe/largest", value)
    metrics.add_rate("perf/tokens_per_s", 100, 4.0)
    expected = {"batch/tokens": 9.0, "loss/total": 7.0 / 4.0, "moe/largest": 2.0, "perf/tokens_per_s": 25.0}
    assert metrics.reduced(alone) == expected and Metrics().reduced(alone) == {}


@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
def test_not_a_number_is_never_hidden(order):
    metrics = Metrics()
    for value in order:
        metrics.add_max("optim/grad_norm", value)
    assert metrics.reduced(alone) == {"optim/grad_norm": math.inf}


@pytest.mark.parametrize("name", ["reward", "Reward/mean", "reward/mean value", "a/b/c"])
def test_names_are_group_and_name(name):
    with pytest.raises(AssertionError, match="lower case"):
        Metrics().add_sum(name, 1.0)


def test_one_name_has_one_reduction():
    metrics = Metrics()
    metrics.add_sum("a/b", 1.0)
    with pytest.raises(AssertionError, match="added as sum and now as max"):
        metrics.add_max("a/b", 1.0)


def test_timer_counts_phases_and_the_rest():
    now = [0.0]
    timer = StepTimer(clock=lambda: now[0])
    for name, seconds in (("rollout", 6.0), ("update", 2.0), ("update", 1.0)):
        with timer.phase(name):
            now[0] += seconds
    now[0] += 1.0
    metrics = Metrics()
    timer.record(metrics, num_tokens=50, num_gpus=4)
    expected = {"perf/tokens_per_s_gpu": 1.25}
    expected |= {"time/rollout_s": 6.0, "time/update_s": 3.0, "time/step_s": 10.0}
    assert metrics.reduced(alone) == expected | {"perf/tokens_per_s": 5.0, "time/framework_fraction": 0.1}
    with pytest.raises(AssertionError, match="inside phase"), timer.phase("rollout"), timer.phase("update"):
        pass


def test_entries_are_merged_by_step_and_a_resume_drops_later_ones(tmp_path):
    folder = RunFolder(tmp_path)
    with closing(StepLog(folder, FILES_ONLY)) as log:
        log.write(0, {"eval/accuracy": 0.25})
        log.write(1, {"reward/mean": 0.5, "optim/grad_norm": math.inf})
        for step in (1, 2, 3):
            log.write(step, {"eval/accuracy": step / 4})
    first = {"step": 0, "eval/accuracy": 0.25}
    merged = {"step": 1, "reward/mean": 0.5, "optim/grad_norm": None, "eval/accuracy": 0.25}
    assert read_metrics(folder)[:2] == [first, merged]
    with folder.metrics.open("a") as file:
        file.write('{"step": 4, "reward/me')  # the writer was killed here
    assert len(read_metrics(folder)) == 4
    StepLog(folder, FILES_ONLY, start_step=2).write(3, {"reward/mean": 40.0})
    last = [{"step": 2, "eval/accuracy": 0.5}, {"step": 3, "reward/mean": 40.0}]
    assert read_metrics(folder) == [first, merged, *last]
    StepLog(folder, FILES_ONLY, start_step=0)
    assert read_metrics(folder) == [first], "which the new start makes again"


def test_a_broken_line_ends_no_resume_and_stays(tmp_path):
    """As a node leaves it that loses power."""
    folder = RunFolder(tmp_path)
    kept = b'{"step": 1}\n\0\0\0\n{"step": 2}\n'
    folder.metrics.write_bytes(kept + b'{"step": 3}\n')
    StepLog(folder, FILES_ONLY, start_step=2)
    assert folder.metrics.read_bytes() == kept


def test_broken_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{oops\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a line of a step"):
        read_metrics(RunFolder(tmp_path))
    with pytest.raises(ValueError, match="no such file"):
        read_metrics(RunFolder(tmp_path / "absent"))


def test_rollout_lines(tmp_path):
    prompt = Prompt(id=7, text="1+1=", token_ids=(1, 2), answer="2")
    samples = tuple(Sample(i, (3, 4), (-0.1, -0.2), "stop", 5, text) for i, text in enumerate(("2", "é")))
    group = RolloutGroup(0, prompt, samples, (Outcome("score", 1.0), Outcome("timeout", detail="10 s")))
    with closing(RolloutLog(RunFolder(tmp_path), 0)) as log:
        log.write(12, [group])
    (line,) = (tmp_path / "rollouts" / "step_000012.replica_0.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["prompt"], record["answer"], record["prompt_id"]) == ("1+1=", "2", 7)
    assert [s["reward"] for s in record["samples"]] == [1.0, None]  # a timeout is not a reward of 0
    outcome = {"status": "timeout", "value": 0.0, "detail": "10 s"}
    response = {"text": "é", "finish_reason": "stop", "num_tokens": 2, "weight_version": 5}
    assert record["samples"][1] == {"reward": None, "outcome": outcome, **response}


def test_samples_of_all_replicas_are_one_record(tmp_path):
    folder, prompt = RunFolder(tmp_path), Prompt(7, "", (1,), "")

    def write(replica, groups, steps=(1, 2, 3)):
        with closing(RolloutLog(folder, replica)) as log:
            for step in steps:
                log.write(step, [RolloutGroup(number, prompt, (), ()) for number in groups])

    def found(step):
        return [record["group_id"] for record in read_rollouts(folder.rollout_files().get(step, {}).values())]

    write(0, [3, 0])
    write(1, [2, 1])
    assert [found(step) for step in (1, 2, 3, 4)] == [[0, 1, 2, 3]] * 3 + [[]]
    cut_record(folder, 1)  # goes on after step 1 with one replica
    write(0, [1, 0], steps=[2])
    assert [found(step) for step in (1, 2, 3)] == [[0, 1, 2, 3], [0, 1], []]
    cut_record(folder, 0)  # begins anew
    (aside,) = tmp_path.iterdir()
    assert sorted(RunFolder(aside).rollout_files()) == [1, 2]


def test_samples_that_cannot_be_written_are_an_error(tmp_path):
    folder = RunFolder(tmp_path)
    log = RolloutLog(folder, 0)
    folder.rollouts.write_text("a file where a folder should be")
    log.write(1, [])
    for wait in (log.flush, log.close):
        with pytest.raises(FileExistsError):
            wait()


def test_tensorboard_reads_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start_step, values in ((0, {0: 0.0, 1: 0.5, 2: 1.0}), (1, {2: 9.0})):
        with closing(StepLog(RunFolder(tmp_path), LogConfig(), start_step)) as log:
            for step, value in values.items():
                log.write(step, {"reward/mean": value})
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("reward/mean")] == [(0, 0.0), (1, 0.5), (2, 9.0)]


def test_a_folder_that_replaces_another_leaves_that_if_it_fails_or_is_killed(tmp_path, monkeypatch):
    target = tmp_path / "weights"
    target.mkdir()
    (target / "old").touch()
    rename = Path.rename

    def full_disk(self: Path, other: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(self, other)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
        patch.setattr(Path, "rename", full_disk)
        with whole_folder(target):
            pass
    assert (target / "old").exists()
    target.rename(tmp_path / ".weights.older")  # killed between the two renames
    with pytest.raises(ValueError, match="no weights"), whole_folder(target):
        raise ValueError("no weights")
    assert [path.name for path in tmp_path.iterdir()] == ["weights"] and (target / "old").exists()


def test_a_folder_behind_a_link_is_replaced_where_it_is(tmp_path, monkeypatch):
    """On the disk that the link leads to, again and again; and the current folder, which has no name."""
    target = tmp_path / "large_disk" / "out"
    target.mkdir(parents=True)
    (tmp_path / "out").symlink_to(target)
    monkeypatch.chdir(target)
    for place in (tmp_path / "out", tmp_path / "out", Path(".")):
        with whole_folder(place) as draft:
            (draft / "new").touch()
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
        monkeypatch.chdir(target)
    names = {path.name for path in tmp_path.rglob("*")}
    assert names == {"out", "large_disk", "new"} and (tmp_path / "out").is_symlink()


@pytest.mark.parametrize(
    ("sources", "refused"),
    [
        (["math-500", "数学", "代码"], ""),
        (["math-500", "Math_500"], "'math-500' and 'Math_500' have metrics of one name, math_500"),
        (["as trained"], "'as trained' and 'the evaluation as in training' have"),
    ],
)
def test_sources_have_metrics_of_their_own(tmp_path, sources, refused):
    lines = [json.dumps({"prompt": "1", "answer": "1", "of": source}) for source in sources]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = DataConfig(path=str(tmp_path / "a.jsonl"), source_key="of")
    if refused:
        with pytest.raises(ValueError, match=refused):
            read_rows(data)
    else:
        found = sorted(row.source for row in read_rows(data))
        assert [name for name, _ in by_source([], found)] == ["math_500", "u4ee3u7801", "u6570u5b66"]


def test_ranks_that_read_other_rows_are_refused():
    rows = [["a.jsonl", 3, "f00d"]]
    read, held_out = (PromptSet([], 0, False, rows=some) for some in (rows, [["b.jsonl", 1, "beef"]]))
    inputs = Inputs(*[None] * 3, prompts=read, eval_prompts=held_out, answering=None, images=None, curriculum=None)
    assert inputs.rows == [*rows, ["b.jsonl", 1, "beef"]], "rows of an evaluation that differ would go unheard"
    assert replace(inputs, eval_prompts=None).rows == rows
    _refuse_other_rows([rows, rows])
    with pytest.raises(ValueError, match="rank 2 has read other rows than rank 0: .*beef"):
        _refuse_other_rows([rows, rows, [["a.jsonl", 3, "beef"]]])


def test_a_record_that_cannot_be_written_does_not_hide_why_a_run_ends(capsys):
    def full_disk() -> None:
        raise OSError(28, "No space left on device")

    for reason in (ValueError, OSError):
        with pytest.raises(reason), RunRecord(experiment(), None, 0, None) as record:
            record._stack.callback(full_disk)
            if reason is ValueError:
                raise ValueError("the real reason")
    assert capsys.readouterr().err == "the run's record: [Errno 28] No space left on device\n"


def test_gradient_norms_are_the_mean_and_the_largest_of_all_updates():
    optim = [{"optim/lr": 2.0, "optim/grad_norm": 581.5}, {"optim/lr": 1.0, "optim/grad_norm": 10.5}]
    assert _optimizer_metrics(optim) == {"optim/lr": 1.0, "optim/grad_norm": 296.0, "optim/grad_norm_max": 581.5}


def test_an_evaluation_measures_samples_and_scores_rollouts():
    cut = [Sample(i, (1,) * 5, (0.0,) * 5, "length", 0, "x", rollout=0) for i in range(3)]
    group = RolloutGroup(0, Prompt(0, "?", (1,), ""), tuple(cut), (Outcome("score", 1.0),))
    metrics = Metrics()
    evaluation_metrics(metrics, "eval", [group], 1)
    found = metrics.reduced(alone)
    assert (found["eval/truncated_fraction"], found["eval/length_mean"]) == (1.0, 5.0)
    assert found["eval/accuracy"] == 1.0 and "eval/pass_at_k" not in found
    scores = (Outcome("score", 1.0), Outcome("score", 1.0), Outcome("score", 0.5), Outcome("error", detail="x"))
    group = RolloutGroup(0, Prompt(0, "?", (1,), ""), tuple(cut), scores)
    evaluation_metrics(metrics := Metrics(), "eval", [group], 2)
    found = metrics.reduced(alone)
    assert found["eval/pass_at_k"] == pytest.approx(5 / 6), "of six pairs one has neither of the two that passed"
    assert (found["eval/accuracy"], found["eval/unscored_fraction"]) == (0.625, 0.25)


def test_metrics_of_responses_and_of_graders_that_fail():
    used_tool, cut = [True, False, False, True], [True, True]
    samples = (
        Sample(0, (1,) * 4, (0.0,) * 4, "stop", 0, "", loss_mask=used_tool),
        Sample(1, (1,) * 2, (0.0,) * 2, "length", 0, "", loss_mask=cut, rollout=1),
        Sample(2, (1,) * 3, (0.0,) * 3, "stop", 0, "", rollout=1),
    )
    outcomes = (Outcome("score", 1.0), Outcome("timeout", detail="10 s"))
    group = RolloutGroup(0, Prompt(0, "?", (1,), ""), samples, outcomes)
    mesh = Mesh(0, 1, 0, 1, None, None, 0, torch.device("cpu"))
    rollout_metrics(metrics := Metrics(), [group], mesh, TrainConfig(max_bad_fraction=0.5))
    response = {"length_mean": 3.0, "length_max": 4.0, "truncated_fraction": 1 / 3, "turns_mean": 1.5}
    response |= {"tool_token_fraction": 2 / 6, "tool_use_fraction": 0.5}
    expected = {f"response/{name}": value for name, value in response.items()}
    assert metrics.reduced(alone) == expected | {"reward/error_fraction": 0.0, "reward/timeout_fraction": 0.5}
    with pytest.raises(RunStopped, match="1 of 2 rewards of this step are errors or timeouts"):
        rollout_metrics(Metrics(), [group], mesh, TrainConfig(max_bad_fraction=0.49))


def test_all_ranks_take_the_checkpoint_that_the_main_rank_found():
    mesh = SimpleNamespace(from_main=lambda look, what: (look(), Path("step_000010"))[1])
    assert latest_checkpoint(experiment(), mesh) == Path("step_000010")


def test_utilization_is_of_gpus_whose_peak_is_known(monkeypatch):
    flops, device = 6.0 * 8e9 * 1e6, torch.device("cuda")
    for name, expected in (("NVIDIA H100 80GB HBM3", flops / 10.0 / 989e12 / 16), ("NVIDIA A100", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert mfu(flops, 10.0, 16, 2, device).get("perf/mfu") == (expected and pytest.approx(expected))
    assert mfu(flops, 10.0, 16, 2, torch.device("cpu")) == {}


def test_training_flops_are_three_forwards_of_the_plans_products():
    arch = architecture_of(json.loads((ROOT / "configs/models/Qwen3-8B/config.json").read_text()))
    forward = model_work(arch).token_flops * 3000 + 3000**2 / 2 * arch.attention.pair_flops * arch.attention_layers
    assert training_flops(arch, [3000], False) == pytest.approx(3 * forward, rel=0.01)
    assert training_flops(arch, [3000], True) == pytest.approx(2 * forward, rel=0.01), (
        "frozen weights have no gradients"
    )
