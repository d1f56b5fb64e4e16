"""Which device trainers choose, what they refuse, and where layers are Transformer Engine's."""

import importlib.metadata
import importlib.util
import sys
import warnings
from pathlib import Path

import pytest
import torch

from examples.laptop.recipe import TinyModelConfig
from megagrpo.actor.host import (
    prepare_host,
    refuse_training_without_gpu,
    slow_attention,
    uses_transformer_engine,
    why_no_gpu,
)
from megagrpo.check.problems import layout_problems
from megagrpo.config.load import load_config
from megagrpo.models.fields import Kernels, context_rule
from megagrpo.models.table import architecture_of
from megagrpo.tools.certify.tiny_model import hf_config
from tests.experiments import QUICKSTART

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def actor(*settings: str):
    return load_config(QUICKSTART, [f"actor.{setting}" for setting in settings]).actor


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine with CUDA and a version of Transformer Engine, whose part for torch runs `body` when it is imported."""

    def of(version: str, body: str = "") -> None:
        folder = tmp_path / "transformer_engine" / "pytorch"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / "__init__.py").write_text(body)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)

    def imported() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]

    before = {name: sys.modules.pop(name) for name in imported()}
    yield of
    for name in imported():
        del sys.modules[name]
    sys.modules.update(before)


def test_cuda_without_a_gpu_is_refused(no_gpu):
    with pytest.raises(ValueError, match="actor.device is cuda, but no GPU is visible here: "):
        prepare_host("cuda")


def test_training_in_bfloat16_without_a_gpu_is_refused(no_gpu):
    with pytest.raises(ValueError, match="no GPU is visible here: .*or set actor.device: cpu to train"):
        refuse_training_without_gpu(actor("dtype=bfloat16"), CPU)
    for fine in (actor("dtype=bfloat16", "device=cpu"), actor("dtype=float32")):
        refuse_training_without_gpu(fine, CPU)
    refuse_training_without_gpu(actor("dtype=bfloat16"), CUDA)


def test_the_reason_is_what_torch_says(monkeypatch: pytest.MonkeyPatch):
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nPlease update")

    monkeypatch.setattr(torch.version, "cuda", None)
    assert why_no_gpu() == f"torch {torch.__version__} is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert why_no_gpu() == "CUDA_VISIBLE_DEVICES is ''"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch._C, "_cuda_init", too_old, raising=False)
    assert why_no_gpu().endswith("CUDA 13.0 says: The NVIDIA driver on your system is too old (found version 12040).")


@pytest.mark.parametrize(
    "version, settings, expected",
    [
        ("2.11.0", ["dtype=bfloat16"], True),
        ("2.14.1+cu13", ["dtype=bfloat16"], True),
        ("2.15.0", ["dtype=bfloat16"], False),
        ("2.20.2", ["dtype=bfloat16"], False),
        ("2.11.0", [], False),  # float32
        ("2.11.0", ["dtype=bfloat16", "lora={rank: 4}"], False),
        ("2.11.0", ["dtype=bfloat16", "transformer_engine=false"], False),
        ("2.11.0", ["dtype=bfloat16", "device=cpu"], False),
        ("2.11.0", ["transformer_engine=true"], True),
    ],
)
def test_where_layers_are_transformer_engines(installed, version, settings, expected):
    installed(version)
    with warnings.catch_warnings(record=True) as told:
        assert uses_transformer_engine(actor(*settings)) is expected
    assert [version in str(one.message) for one in told] == ([True] if version >= "2.15" else [])


@pytest.mark.parametrize(
    "body", ["import missing_library", "raise OSError('undefined symbol')", "raise RuntimeError('built for cu12')"]
)
def test_one_that_cannot_be_imported_leaves_layers_to_torch_and_says_why(installed, body):
    installed("2.11.0", body)
    with pytest.warns(UserWarning, match="its import fails: .*(missing_library|undefined symbol|built for cu12)"):
        assert not uses_transformer_engine(actor("dtype=bfloat16"))
    assert "transformer_engine" not in sys.modules, "or it could not be hidden"
    assert uses_transformer_engine(actor("transformer_engine=true"))


def test_on_a_cpu_they_are_only_on_request(no_gpu):
    assert not uses_transformer_engine(actor("dtype=bfloat16"))
    assert uses_transformer_engine(actor("transformer_engine=true"))


@pytest.mark.parametrize(
    "settings, refused",
    [
        (["dtype=bfloat16"], False),
        (["dtype=bfloat16", "device=cpu", "transformer_engine=false"], False),
        (["dtype=float32"], False),  # perhaps on a CPU: seen when it starts
        (["dtype=bfloat16", "transformer_engine=false"], True),
        (["dtype=bfloat16", "lora={rank: 4}"], True),
        (["dtype=float32", "device=cuda"], True),
    ],
)
def test_context_parallelism_on_a_gpu_needs_its_attention(settings, refused):
    arch = architecture_of(hf_config(TinyModelConfig()))
    found = actor("world_size=2", "parallel={cp: 2}", *settings)
    problems = [problem for problem in layout_problems(arch, found) if "actor.parallel.cp = 2 needs" in problem]
    assert bool(problems) is refused
    plain = found.model_copy(update={"dtype": "bfloat16", "lora": None})
    assert context_rule(plain, Kernels(True, False, False)).when, "as the ranks of a GPU find out"


@pytest.mark.parametrize(
    ("capability", "packing", "deterministic", "version", "said"),
    [
        ((9, 0), True, True, "2.11.0", ""),
        ((8, 0), True, False, "2.14.1", "packed rows on GPUs of compute capability 8.0"),
        ((8, 0), False, True, "2.14.1", ""),
        ((10, 0), True, False, "2.11.0", ""),
        ((10, 0), True, True, "2.11.0", "deterministic runs on GPUs of compute capability 10.0"),
        ((10, 0), True, True, "2.14.1", ""),
        ((12, 0), True, False, "2.13.0", "packed rows"),
        ((12, 0), True, False, "2.14.1", ""),
        ((12, 0), True, True, "2.14.1", "deterministic runs on GPUs of compute capability 12.0"),
    ],
)
def test_gpus_without_a_fused_attention_are_told(monkeypatch, capability, packing, deterministic, version, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    found = slow_attention(packing, deterministic)
    assert said in found if said else not found
