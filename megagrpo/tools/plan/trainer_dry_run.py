"""Records what trainer ranks copy from an HF model, without weights and without other ranks.

The world is pretended: torch's fake process group has its size and answers nothing, the modules are
Megatron's own on the meta device. One process takes the place of one rank after the other.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megagrpo.actor.megatron.config import kernels_here, transformer_config
from megagrpo.actor.megatron.model import build_chunks, chunk_parameters, load_hf
from megagrpo.actor.megatron_actor import make_parallel_groups
from megagrpo.config.actor import ActorConfig
from megagrpo.families.architecture import Architecture
from megagrpo.mesh import only_fake_groups
from megagrpo.weights.copies.record import Copy, Specs, record_copies

_META = torch.device("meta")


def record_trainer_rank(
    arch: Architecture, config: ActorConfig, specs: Specs, rank: int
) -> tuple[dict[str, int], list[Copy]]:
    """Returns Megatron's coordinates of rank `rank` of `config.world_size`, and its copy list.

    Coordinates: its index among the ranks of "tp", "pp", "ep" and "etp". The process must be in no
    process group.
    """
    with pretended_world(config, rank), _META:
        tensor_parallel.model_parallel_cuda_manual_seed(
            0
        )  # Megatron asks for the state even where nothing is drawn
        kernels = kernels_here(config)
        chunks = build_chunks(
            arch, config, transformer_config(arch, config, kernels), kernels, _META
        )
        read = _Noting(
            specs
        )  # of a large model a rank reads few, and making the others takes longest
        load_hf(chunks, arch, read)
        wanted = {name: specs[name] for name in read}
        copies = record_copies(
            lambda hf: load_hf(chunks, arch, hf), wanted, chunk_parameters(chunks)
        )
        place = {
            "tp": mpu.get_tensor_model_parallel_rank(),
            "pp": mpu.get_pipeline_model_parallel_rank(),
            "ep": mpu.get_expert_model_parallel_rank(),
            "etp": mpu.get_expert_tensor_parallel_rank(),
        }
    return place, copies


@contextmanager
def pretended_world(config: ActorConfig, rank: int) -> Iterator[None]:
    """Makes this process rank `rank` of a world in which nobody answers."""
    dist.init_process_group("fake", rank=rank, world_size=config.world_size, store=FakeStore())
    try:
        with only_fake_groups():
            make_parallel_groups(config)
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


class _Noting(dict[str, Tensor]):
    """HF tensors without memory, made when they are first read."""

    def __init__(self, specs: Specs):
        super().__init__()
        self._specs = specs

    def __missing__(self, name: str) -> Tensor:
        shape, dtype = self._specs[name]
        self[name] = tensor = torch.empty(shape, dtype=dtype, device=_META)
        return tensor
