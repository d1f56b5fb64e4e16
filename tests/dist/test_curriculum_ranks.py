"""data.curriculum over gloo ranks: the same rows for every data-parallel size, also across a resume."""

import pytest
from fake_service import FakeService, running

from tests.curricula import assert_left_out, continued, dropping
from tests.dist.workers.launch import run_meshes
from tests.sampling import MESH

STEPS, BREAK = 6, 3


@pytest.mark.parametrize("staleness", [0, 1])
def test_rows_do_not_depend_on_the_layout(tmp_path, staleness):
    """One rank; two replicas; and one rank's first steps continued by two replicas of two ranks."""
    config = dropping(staleness)
    with running(FakeService()) as service:
        whole = continued(MESH, service.url, tmp_path / "one", config, STEPS)
    assert_left_out(whole, staleness)
    with running(FakeService()) as service:
        two = run_meshes(2, tmp_path, continued, service.url, tmp_path / "two", config, STEPS)
    assert two == [whole] * 2
    with running(FakeService()) as service:
        first = continued(MESH, service.url, tmp_path / "parts", config, BREAK)
        last = run_meshes(4, tmp_path, continued, service.url, tmp_path / "parts", config, STEPS, replicas=2)
    assert [first + rest for rest in last] == [whole] * 4
