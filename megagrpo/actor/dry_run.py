"""Records what trainer ranks copy from an HF model, without weights and without other ranks.

The world is pretended: torch's fake process group has its size and answers nothing, the modules are Megatron's own on
the meta device. One process takes the place of one rank after the other.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megagrpo.actor.megatron.config import kernels_here, transformer_config
from megagrpo.actor.megatron.model import HiddenStatesModel, build_chunks, chunk_parameters, load_hf
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

    Coordinates: its index among the ranks of "tp", "pp", "ep" and "etp". The process must be in no process group.
    """
    with pretended_world(config, rank), _META:
        tensor_parallel.model_parallel_cuda_manual_seed(0)  # Megatron asks for the state even where nothing is drawn
        kernels = kernels_here(config)
        chunks = build_chunks(arch, config, transformer_config(arch, config, kernels), kernels, _META)
        wanted = {name: specs[name] for name in _names_read(chunks, arch, specs)}
        copies = record_copies(lambda hf: load_hf(chunks, arch, hf), wanted, chunk_parameters(chunks))
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


class _Noting(Mapping[str, Tensor]):
    """HF tensors without memory, made when asked for; remembers their names."""

    def __init__(self, specs: Specs):
        self._specs = specs
        self.names: dict[str, None] = {}  # in order

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._specs[name]
        self.names[name] = None
        return torch.empty(shape, dtype=dtype, device=_META)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def _names_read(chunks: list[HiddenStatesModel], arch: Architecture, specs: Specs) -> list[str]:
    """Returns which HF tensors the rank reads at all: of a large model few, and making the others takes longest."""
    noting = _Noting(specs)
    load_hf(chunks, arch, noting)
    return list(noting.names)
