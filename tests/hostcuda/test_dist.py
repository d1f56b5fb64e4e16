"""Tests of tests/dist on the device, as they stand: those that CI runs. The others: pytest --hostcuda tests/dist."""

from pathlib import Path

import pytest

from tests.dist.test_actor_checkpoint import (
    test_the_optimizers_own_weights_come_back_from_the_host_bit_by_bit as offloaded,
)
from tests.dist.test_weights_reshard import test_engines_are_filled_exactly_and_outlive_a_rank_that_dies as published


def test_checkpoints_and_offload(hf_models: Path, tmp_path: Path):
    offloaded(hf_models, tmp_path)


@pytest.mark.parametrize("transport", ["reshard", "ipc"])
def test_a_publish_outlives_an_engine(tmp_path: Path, transport: str):
    published(tmp_path, 4, 2, 1, "bfloat16", transport)
