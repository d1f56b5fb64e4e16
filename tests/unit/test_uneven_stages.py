"""Pipeline stages of unequal size: what can be cut, and what is said about the rest."""

import re

import pytest

from megagrpo.config.layout import layout_problems
from megagrpo.config.schema import ActorConfig, ParallelConfig
from megagrpo.families.table import read_architecture
from tests.experiments import ROOT


@pytest.mark.parametrize(
    ("num_layers", "sizes", "stages"),
    [
        (4, {}, [4]),
        (4, {"pp": 2}, [2, 2]),
        (5, {"pp": 2, "first_stage_layers": 3}, [3, 2]),
        (5, {"pp": 2, "last_stage_layers": 3}, [2, 3]),
        (5, {"pp": 2, "first_stage_layers": 2, "last_stage_layers": 3}, [2, 3]),
        (94, {"pp": 8, "first_stage_layers": 11, "last_stage_layers": 11}, [11, *[12] * 6, 11]),
        (10, {"pp": 3, "vpp": 2, "first_stage_layers": 2}, [2, 4, 4]),
    ],
)
def test_layers_of_stages(num_layers, sizes, stages):
    assert ParallelConfig(**sizes).stage_layers(num_layers) == stages


@pytest.mark.parametrize(
    ("num_layers", "sizes", "message"),
    [
        (5, {}, "num_hidden_layers = 5 cannot be cut into 2 equal stages"),
        (5, {"first_stage_layers": 5}, "5 less first_stage_layers and last_stage_layers, 5 together, cannot"),
        (3, {"first_stage_layers": 4}, "4 together, cannot be cut into 1 equal"),
        (6, {"first_stage_layers": 3, "last_stage_layers": 2}, "5 together, cannot be cut into 0 equal stages"),
        (6, {"vpp": 2, "first_stage_layers": 3}, "a stage of 3 layers does not divide into vpp = 2 virtual stages"),
    ],
)
def test_what_cannot_be_cut_is_said(num_layers, sizes, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(pp=2, **sizes).stage_layers(num_layers)


def test_one_stage_has_all_layers():
    with pytest.raises(ValueError, match="first_stage_layers 3 needs pp > 1"):
        ParallelConfig(first_stage_layers=3)


@pytest.mark.parametrize(
    ("model", "sizes", "ends"),
    [
        ("DeepSeek-V3-0324", {"pp": 8}, (7, 6)),
        ("DeepSeek-V3-0324", {"pp": 16}, (3, 2)),
        ("DeepSeek-V3-0324", {"pp": 8, "first_stage_layers": 9}, (7, 6)),
        ("Qwen3-235B-A22B", {"pp": 8}, (11, 11)),
        ("Qwen3-235B-A22B", {"pp": 8, "vpp": 2}, (12, 10)),
        ("DeepSeek-V3-0324", {"pp": 8, "vpp": 2}, None),
    ],
)
def test_the_message_names_stages_that_are_accepted(model, sizes, ends):
    arch = read_architecture(ROOT / "configs" / "models" / model)

    def problems(**more: int) -> list[str]:
        config = ActorConfig(world_size=sizes["pp"], parallel=ParallelConfig(**sizes | more), dtype="bfloat16")
        return [text for text in layout_problems(arch, config) if "num_hidden_layers" in text]

    (said,) = problems()
    named = re.search(r"actor.parallel.first_stage_layers: (\d+) and last_stage_layers: (\d+)", said)
    assert ends == (named and tuple(map(int, named.groups()))), said
    if ends:
        assert problems(first_stage_layers=ends[0], last_stage_layers=ends[1]) == []
