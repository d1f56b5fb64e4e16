"""What leaves a GPU lies in one pinned buffer of exactly its size; torch's own pinned memory rounds every part up."""

import json
from types import SimpleNamespace
from unittest import mock

import torch

from tests.experiments import ROOT, python

SHAPES = {"a": (1000, 3), "b": (7,), "c": (33, 65)}  # 12,000, 28 and 8,580 bytes


def registered() -> dict[str, list]:
    """Keeps a reference on a pretended GPU; returns what is pinned and released, and by torch's own allocator."""
    from megagrpo.actor.host_buffer import HostReference

    found: dict[str, list] = {"pinned": [], "released": [], "by torch": []}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda pointer, size, flags: found["pinned"].append(size) or 0,
        cudaHostUnregister=lambda pointer: found["released"].append(1) or 0,
    )
    parameters = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    kept = {name: tensor.clone() for name, tensor in parameters.items()}
    gpu = torch.device("cuda", 0)
    with (
        mock.patch.object(torch.cuda, "cudart", lambda: runtime),
        mock.patch.object(torch.cuda, "check_error", lambda status: None),
        mock.patch.object(torch.Tensor, "device", property(lambda tensor: gpu)),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: found["by torch"].append(tensor.nbytes)),
    ):
        reference = HostReference(parameters)
        for tensor in parameters.values():
            tensor.zero_()
        with reference.swapped_in():
            assert all(torch.equal(parameters[name], tensor) for name, tensor in kept.items())
        assert not any(tensor.any() for tensor in parameters.values())
        del reference
    return found


def test_a_reference_is_pinned_once_and_not_rounded():
    printed = python("-m", "tests.unit.test_host_buffer", cwd=ROOT)
    needed = sum(-(-torch.Size(shape).numel() * 4 // 256) * 256 for shape in SHAPES.values())
    assert json.loads(printed) == {"pinned": [needed], "released": [1], "by torch": []}


if __name__ == "__main__":
    print(json.dumps(registered()))
