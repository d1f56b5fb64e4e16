"""The GPU kit: what goes wrong in one section is reported and the others go on.

That its sections run to their end is in tests/dist/test_gpu_kit_run.py, on a GPU in tests/gpu/test_kit.py.
"""

import json
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest
import torch

from bench.gpu import SECTIONS, run_all
from bench.gpu_kit.children import Outcome, Section, run_section
from bench.gpu_kit.figures import Figure, Setting
from bench.gpu_kit.report import above_bounds, is_failure, write_report
from bench.gpu_kit.timing import synchronizations
from bench.readme import last_device

PLANTED = "tests.unit.planted_sections"
ORIGIN = {"commit": "abc", "date": "2026-01-02", "machine": "1 CPU cores"}


def planted(name: str, limit_s: float = 30.0) -> Section:
    return Section(f"{PLANTED}:{name}", limit_s)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    sections = {name: planted(name) for name in ("raises", "crashes", "lacks", "misses", "above", "works")}
    sections = {"hangs": planted("hangs", 2.0), **sections}
    return run_all(sections, Setting("cpu", small=True, folder=tmp_path_factory.mktemp("kit")), limit_s=60.0)


def test_what_goes_wrong_ends_one_section(outcomes):
    by_name = {outcome.section: outcome for outcome in outcomes}
    assert {name: outcome.status for name, outcome in by_name.items()} == {
        "hangs": "timed out",
        "raises": "failed",
        "crashes": "failed",
        "lacks": "unavailable",
        "misses": "failed",
        "above": "done",
        "works": "done",
    }
    assert by_name["raises"].reason == "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert [figure.value for figure in by_name["raises"].figures] == [1.5]  # found before it failed
    assert by_name["crashes"].reason.startswith("ended by SIGSEGV")
    assert any("about to crash" in line for line in by_name["crashes"].last_lines)
    assert by_name["lacks"].reason == "not installed here: flash_attn"
    assert "a_library_that_nobody_has" in by_name["misses"].reason
    assert any("in hangs" in line for line in by_name["hangs"].last_lines)  # where it hung
    assert by_name["works"].figures[0].value == 2
    assert [is_failure(outcome) for outcome in outcomes].count(True) == 4


def test_nothing_of_a_section_is_left_running(outcomes):
    (started,) = next(outcome for outcome in outcomes if outcome.section == "hangs").figures
    assert not psutil.pid_exists(started.value) or psutil.Process(started.value).status() == psutil.STATUS_ZOMBIE


def test_report(outcomes, tmp_path, capsys):
    page = write_report(tmp_path, outcomes, ORIGIN)
    text = page.read_text()
    assert "| raises |  | **failed** |" in text and "RuntimeError: CUDA out of memory. Tried" in text
    assert "**0.5 nats** | 0.1" in text and "**nan** | 0.1" in text
    assert len(above_bounds(outcomes)) == 2
    data = json.loads(page.with_suffix(".json").read_text())
    assert [section["status"] for section in data["sections"]] == [outcome.status for outcome in outcomes]
    assert data["commit"] == "abc"
    assert capsys.readouterr().out.strip() in text


def test_a_section_in_a_fresh_interpreter(tmp_path, monkeypatch):
    """As on a GPU; without one it would fail before it begins."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    outcome = run_section("works", planted("works"), Setting("cuda", small=True, folder=tmp_path))
    assert (outcome.status, [figure.value for figure in outcome.figures]) == ("done", [2])


def test_the_time_limit_of_all(tmp_path):
    outcomes = run_all({"works": planted("works")}, Setting("cpu", small=True, folder=tmp_path), limit_s=0.0)
    assert [outcome.status for outcome in outcomes] == ["not run"]


def test_limits_leave_every_section_a_chance():
    """The first half fits into 8 minutes even when every one of them hangs."""
    limits = [section.limit_s for section in SECTIONS.values()]
    assert sum(limits[: len(limits) // 2]) <= 600


def test_synchronizations_are_counted_by_line():
    with synchronizations(torch.device("cpu")) as found, warnings.catch_warnings():
        warnings.showwarning("called a synchronizing CUDA operation", UserWarning, "file", 1)
        warnings.warn("something else", stacklevel=1)
    assert dict(found) == {"elsewhere": 1}


def test_last_device(tmp_path):
    """docs/evidence/gpu.md says where the kit last ran, from what it wrote."""
    assert "none was at hand" in last_device(tmp_path)
    for date, device in (("2026-01-02", "NVIDIA H100"), ("2026-03-01", "NVIDIA H200"), ("2026-04-01", "cpu")):
        surroundings = Outcome("surroundings", "done", figures=[Figure("device", device)])
        others = [Outcome("engine", "unavailable"), Outcome("head", "timed out")]
        write_report(tmp_path, [surroundings, *others], ORIGIN | {"date": date})
    assert "NVIDIA H200, 2026-03-01, commit abc: 1 of 3 sections to their end, 1 lacked something" in last_device(
        tmp_path
    )


def test_models_that_are_compared_across_devices_are_drawn_on_the_cpu(monkeypatch):
    from bench.gpu_kit import precision
    from bench.gpu_kit.models import RandomTensors, description
    from megagrpo.models.table import architecture_of

    devices = []
    monkeypatch.setattr(
        precision, "random_actor", lambda *args, drawn_on, **options: devices.append(drawn_on) or nullcontext()
    )
    with suppress(AttributeError):  # no actor
        precision.measure("qwen3", "float32", Path(), {})
    assert devices == [torch.device("cpu")]
    arch = architecture_of(description("qwen3", precision.FAMILIES["qwen3"]))
    elsewhere = RandomTensors(arch, torch.device("meta"), drawn_on=devices[0])
    assert elsewhere["model.embed_tokens.weight"].device.type == "meta"  # drawn on the CPU, then moved
