"""What a terminal shows: help in groups, the nearest word, `check` on one screen, exit codes."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megagrpo import cli
from megagrpo.config.load import load_config
from megagrpo.tools.check.loading import LoadingTest
from megagrpo.tools.explain import explain
from megagrpo.tools.plan.engine_memory import concurrency_report
from tests.experiments import QUICKSTART, ROOT

SCREEN = 40  # lines
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_node_of_several_does_not_run_alone(command, monkeypatch, capsys):
    monkeypatch.setattr("megagrpo.check.problems.refuse_for_engines", lambda config: None)
    monkeypatch.setattr(cli, "run", lambda config: 0)
    monkeypatch.setitem(sys.modules, "megagrpo.rollout.service.server", SimpleNamespace(serve=lambda *_: 0))
    assert cli.main([command, str(QUICKSTART), "--nnodes", "2", "--node-rank", "1"]) == 2
    assert "2 nodes need the address of node 0: give --master-addr" in capsys.readouterr().err


def test_help_has_every_command_in_one_group_with_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2] != " "]
    commands = [word for word in listed if not word.startswith("-") and word != "COMMAND"]
    assert sorted(commands) == sorted(cli.command_parsers())
    for group in ("run: megagrpo run ", "look: megagrpo ", "plan: megagrpo ", "verify: megagrpo "):
        assert f"\n{group}" in text
    for line in text.splitlines():
        if ": megagrpo " in line and not line.startswith("usage"):  # an example is a command
            words = line.partition(": megagrpo ")[2].split()
            cli._parser(words).parse_args(words)


@pytest.mark.parametrize(
    "words, said",
    [
        (["chekc", "x"], "no command 'chekc'; did you mean 'check'?"),
        (["plan", "x", "--serach", "2"], "arguments: --serach 2; did you mean '--search'?"),
        (["frobnicate"], "invalid choice"),
    ],
)
def test_the_nearest_word_is_named(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_check_fits_on_a_screen_and_begins_with_the_verdict(path: Path):
    config = load_config(path)
    trial = LoadingTest(loaded=["a file"] * 6, first_row=["a row"] * 12)
    whole = explain(config, trial, concurrency_report(config, None), True, [])
    short = explain(config, trial, concurrency_report(config, None, False), False, [])
    assert short.startswith("no problems found\n") and len(short.splitlines()) <= SCREEN
    facts = short.splitlines()[:-1]  # the last line says what is left out
    assert short.splitlines()[-1].startswith("--all: ")
    assert len(facts) < len(whole.splitlines())


def test_the_experiment_is_wrong_is_one_exit_code(monkeypatch, capsys):
    monkeypatch.setattr("megagrpo.tools.explain._library_problems", lambda config: [])
    Path("empty.yaml").write_text("")
    for command in (["check"], ["plan"], ["run"], ["submit", "--dry-run"], ["sft"], ["try"]):
        for experiment in ("absent.yaml", "empty.yaml", str(QUICKSTART)):
            if experiment == str(QUICKSTART) and command[0] in ("sft", "submit"):
                continue  # it starts before it reads data; a dry run goes on without files
            assert cli.main([command[0], experiment, *command[1:]]) == 2, (command, experiment)
    assert "PROBLEMS (" in capsys.readouterr().out  # check's: no file of the experiment is here
    for words in (["view", "absent"], ["status", "absent"], ["report", "absent"], ["stop", "absent"]):
        assert cli.main(words) == 2, words


@pytest.mark.parametrize("command", [["run"], ["run", "--master-addr", "x"], ["submit", "--dry-run"]])
def test_libraries_judge_their_settings_before_anything_starts(command, capsys, monkeypatch):
    answer = '[[["actor", "megatron", "+moe_permute_fusoin"], "no such field"]]'
    monkeypatch.setattr("megagrpo.check.libraries.answer_of", lambda *job: answer)
    typo = ["--set", 'actor.megatron={"+moe_permute_fusoin": true}']
    assert cli.main([command[0], str(QUICKSTART), *command[1:], *typo]) == 2
    assert "+moe_permute_fusoin = True: no such field" in capsys.readouterr().err
