"""What a user did wrong is said in one message, with a non-zero exit, before anything is written."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from run_megagrpo import GRADERS, LONG_RUN, Finished, megagrpo, write_experiment

from megagrpo.cli import main
from megagrpo.system.environment import API_KEY, child_environment


def refused(config: Path, *overrides: str, run: Callable[..., Finished] = megagrpo) -> str:
    """What `megagrpo run` says when it refuses an experiment at once."""
    sets = [word for override in overrides for word in ("--set", override)]
    done = run("run", config, *sets, timeout_s=300)
    assert done.status == 2 and done.stdout == "", done
    assert "Traceback" not in done.stderr and done.stderr.startswith("megagrpo run: ")
    assert not config.with_suffix("").exists(), "the run folder was made"
    return done.stderr


def in_this_process(command: str, config: Path, *words: str, timeout_s: float) -> Finished:
    """The same without the seconds that a new Python takes to import everything."""
    (config.parent / "graders_of_tests.py").write_text(GRADERS)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.syspath_prepend(str(config.parent))
        status = main([command, str(config), *words])
    return Finished(status, out.getvalue(), err.getvalue())


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.num_step=3", "train.num_step = 3: unknown key; did you mean 'num_steps'?"),
        ("weights.timeout_s=700", "weights.timeout_s 700 must be below actor.deadline_s 600: other ranks wait"),
        ("actor={world_size: 3, parallel: {pp: 3}}", "pp x vpp = 3 does not divide the model's num_hidden_layers = 2"),
        ("data.path=nowhere.jsonl", "data.path: nowhere.jsonl does not exist"),
        ("sampling.max_response_tokens=4000", "4008 tokens, but the model has 2048 positions"),
        ("reward.grader=graders_of_tests:low_digit", "has no function low_digit; did you mean 'low_digits'?"),
    ],
)
def test_an_impossible_experiment(experiments, override, said):
    """One of each stage that judges it; tests/unit/test_refusals.py and its neighbors have the rules."""
    assert said in refused(write_experiment(experiments / "refused"), override, run=in_this_process)


def test_what_the_warm_up_has_not_made_yet(experiments):
    sft = {"model": str(experiments / "model"), "path": str(experiments / "data" / "sft.jsonl")}
    config = write_experiment(experiments / "refused", sft=sft, model={"path": str(experiments / "warm")})
    assert f"missing: {experiments / 'warm'}; run `megagrpo sft` first\n" in refused(config)


def test_a_broken_line_is_named_by_file_and_line(experiments, tmp_path):
    """Of the training and of the evaluation data; tests/unit/test_prompts.py has every kind of broken line."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "anwser": "3"}\n')
    said = "lines.jsonl:2: no key 'answer'; keys found: 'prompt', 'anwser'"
    for override in (f"data.path={path}", f"eval={{data: {{path: {path}}}}}"):
        assert said in refused(write_experiment(experiments / "refused"), override, run=in_this_process)


def trainers_alone(config: Path, *settings: str) -> tuple[Finished, list[str]]:
    """torchrun of `megagrpo train` as on a cluster, with a service that is not there; and what the ranks report.

    Once one has ended torchrun ends the others, now and then before they have written theirs.
    """
    (config.parent / "graders_of_tests.py").write_text(GRADERS)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*ranks, "-m", "megagrpo.cli", "train", str(config), "--service", "http://127.0.0.1:9"]
    command += [word for setting in settings for word in ("--set", setting)]
    env = child_environment({API_KEY: "of the run"}, [str(config.parent)])
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    reports = sorted((config.with_suffix("") / "logs").glob("error_trainer_rank*.txt"))
    return Finished(done.returncode, done.stdout, done.stderr), [report.read_text() for report in reports]


@pytest.mark.slow
def test_a_service_that_is_not_there(experiments):
    """Prompts that are too long are reported on the way: counted, with the limit."""
    sections = {"data": {"max_prompt_tokens": 5}, "rollout": {"start_timeout_s": 5.0}}
    done, reports = trainers_alone(write_experiment(experiments / "unreachable", **sections))
    assert done.status != 0 and len(set(reports)) == 1, "every rank knows why"
    assert "no rollout service answers at http://127.0.0.1:9" in reports[0] and "\n" not in reports[0]
    assert "is `megagrpo serve` running" in reports[0]
    lines = (experiments / "data" / "train.jsonl").read_text().splitlines()
    too_long = sum(len(json.loads(line)["prompt"]) > 5 for line in lines)
    assert 0 < too_long < len(lines)
    assert f"{too_long} of {len(lines)} prompts dropped, longer than 5 tokens (max_prompt_tokens)" in done.stdout


def test_a_damaged_checkpoint_is_not_resumed(long_run):
    """Refused before the service is needed, and the record of the run that made it stays as it was.

    tests/dist/test_checkpoint_damage.py has every damage, and a checkpoint of another model.
    """
    folder = long_run[0].parent / "flipped"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    copy = Path(shutil.copytree(long_run[0] / "checkpoints" / "step_000010", folder / "checkpoints" / "step_000010"))
    path = max((copy / "actor").glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    done, reports = trainers_alone(write_experiment(folder, **LONG_RUN))
    said = f"checkpoint file {path} is corrupt: its CRC-32 differs from the manifest"
    assert done.status != 0 and set(reports) == {said}
    assert (folder / "metrics.jsonl").read_text() == '{"step": 0}\n'


@pytest.mark.slow
def test_a_checkpoint_of_other_rows_is_not_resumed(long_run):
    folder = long_run[0].parent / "other_rows"
    checkpoint = "checkpoints/step_000010"
    shutil.copytree(long_run[0] / checkpoint, folder / checkpoint)
    done, reports = trainers_alone(write_experiment(folder, **LONG_RUN, data={"limit": 40}))
    assert done.status != 0 and len(set(reports)) == 1, "every rank knows why"
    assert f"checkpoint {folder / checkpoint} counts its prompts in other data" in reports[0]
    assert "40 now" in reports[0] and "checkpoint.resume: other_data" in reports[0]
