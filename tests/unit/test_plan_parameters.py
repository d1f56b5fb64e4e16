"""The plan counts every parameter of each published model."""

from pathlib import Path

import pytest

from megagrpo.models.folder import Model
from megagrpo.models.table import model_tensors, parameter_counts, text_tensors
from megagrpo.tools.plan.work import model_work

MODELS = Path(__file__).parents[2] / "configs" / "models"


@pytest.mark.parametrize("folder", sorted(MODELS.iterdir()), ids=lambda folder: folder.name)
def test_the_work_is_of_every_parameter(folder):
    arch = Model.read(folder).arch
    counts, work = parameter_counts(arch), model_work(arch)
    tower = 0 if arch.vision is None else sum(spec.size for spec in arch.vision.tensors())
    vocabulary = work.vocabulary * (1 if arch.tied else 2)
    # behind the layers: the last norm, and what makes streams one
    outside = ((spec.name, spec.size) for spec in text_tensors(arch) if arch.vocab_size not in spec.shape)
    behind = sum(size for name, size in outside if "layers." not in name)
    tables = sum(spec.size for spec in model_tensors(arch) if "ple_embedding" in spec.name)  # frozen
    assert work.dense + work.expert + vocabulary + behind + tower + tables == counts.total
    active = work.token_flops / 2 + behind
    # without the embedding, which only looks up, and the tower, which tokens of text do not meet
    assert active == pytest.approx(counts.active - tower, rel=1e-9)
