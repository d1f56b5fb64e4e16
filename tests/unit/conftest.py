"""Fixtures of the unit tests, which run in an empty folder: none of them sees runs/ of the checkout."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megagrpo.cluster.supervise import _SIGNALS
from megagrpo.cpu.trainer import without_triton

without_triton()  # some tests import the actor's modules, hence Megatron, outside a trainer


@pytest.fixture(autouse=True)
def empty_folder(tmp_path_factory, monkeypatch) -> None:
    """Relative paths, as in configs/, point into a folder without files."""
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))


@pytest.fixture(autouse=True)
def handlers_of_pytest() -> Iterator[None]:
    """Restores the handlers of signals: a launch that takes stop requests leaves all ignored."""
    old = {number: signal.getsignal(number) for number in _SIGNALS}
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.fixture
def prepared(tmp_path, monkeypatch) -> Path:
    """The current folder, with the start model's config.json and data files of configs/quickstart.yaml."""
    from examples.laptop.recipe import TinyModelConfig
    from megagrpo.tools.certify.tiny_model import hf_config

    monkeypatch.chdir(tmp_path)
    made = tmp_path / "runs" / "quickstart"
    for name in ("random", "data"):
        (made / name).mkdir(parents=True)
    (made / "random" / "config.json").write_text(json.dumps(hf_config(TinyModelConfig())))
    for name in ("sft", "train", "eval"):
        (made / "data" / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path
