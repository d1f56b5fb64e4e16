"""What libraries accepted is asked again when the question, the model's files or a variable changes."""

import pytest

from megagrpo.check import libraries
from megagrpo.check.remembered import Accepted
from megagrpo.config.load import load_config
from tests.experiments import QUICKSTART


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_changed_question_file_or_variable_is_another_question(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert not Accepted(["a"], [str(model)])
    Accepted(["a"], [str(model)]).remember()
    assert Accepted(["a"], [str(model)])
    assert not Accepted(["b"], [str(model)])
    (model / "config.json").write_text('{"hidden_size": 8}')
    assert not Accepted(["a"], [str(model)])
    (model / "config.json").write_text("{}")
    Accepted(["a"], [str(model)]).remember()
    monkeypatch.setenv("SGLANG_ANYTHING", "1")
    assert not Accepted(["a"], [str(model)])


@pytest.mark.parametrize("folder", ["file", "x" * 300, None])  # None: a user without a home
def test_a_cache_that_cannot_be_written_only_costs_time(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / folder) if folder else "")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    Accepted(["a"]).remember()
    assert not Accepted(["a"])


@pytest.mark.parametrize(("answer", "times"), [("[]", 1), ('[[["actor", "megatron", "apply_rope_fusion"], "no"]]', 2)])
def test_only_what_was_accepted_is_not_asked_again(answer, times, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(libraries, "answer_of", lambda *job: asked.append(job) or answer)
    config = load_config(str(QUICKSTART), ['actor.megatron={"apply_rope_fusion": true}'])
    found = [libraries.library_problems(config) for _ in range(2)]
    assert found[0] == found[1] and bool(found[0]) == (times == 2)
    assert len(asked) == times
    assert capsys.readouterr().err.count("asking megatron") == times
