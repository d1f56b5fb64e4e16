"""What libraries accepted is asked again when the question, the model's files or a variable changes."""

import pytest

from megagrpo.check import libraries, remembered
from megagrpo.check.remembered import Accepted
from megagrpo.config.load import load_config
from tests.experiments import QUICKSTART


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_changed_question_file_or_variable_is_another_question(tmp_path, monkeypatch):
    model, draft = tmp_path / "lr=1" / "model", tmp_path / "draft.json"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    draft.write_text("{}")
    question = ["--model-path", str(model), {"words": [f"--draft={draft}", "x" * 5000]}]
    assert not Accepted(question)
    Accepted(question).remember()
    assert Accepted(question)
    assert not Accepted([*question, "b"])
    for file in (model / "config.json", draft):
        file.write_text('{"hidden_size": 8}')
        assert not Accepted(question)
        Accepted(question).remember()
    monkeypatch.setenv("SGLANG_ANYTHING", "1")
    assert not Accepted(question)


def test_other_packages_and_another_source_of_a_library_are_another_question(tmp_path, monkeypatch):
    """PYTHONPATH often names a checkout of Megatron-LM, whose version stays for hundreds of commits."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    changes = [
        lambda: None,
        lambda: (core / "config.py").write_text("a = 1"),
        lambda: monkeypatch.syspath_prepend(str(tmp_path)),
        lambda: (core / "config.py").write_text("a = 10"),
        lambda: (tmp_path / "transformer_engine-2.9.0.dist-info").mkdir(),
    ]
    asked = []
    for change in changes:
        change()
        remembered._installed.cache_clear()  # as in another process
        asked.append(Accepted(["a"])._file)
    assert asked[0] == asked[1], "not on the path yet"
    assert len(set(asked)) == 4


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


def test_a_library_that_does_not_answer_in_time_is_one_message(monkeypatch):
    monkeypatch.setattr(libraries, "_LIMIT_S", 0.01)
    with pytest.raises(ValueError, match=r"(?s)^sglang cannot be imported: .* timed out after 0.01 seconds"):
        libraries.answer_of("megagrpo.check.libraries", [], None, "sglang cannot be imported")
