"""Megatron's own modules of any rank of any world, in one process without weights: torch's fake
process group has the world's size and answers nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megagrpo.actor.megatron_actor import make_parallel_groups
from megagrpo.actor.megatron_config import kernels_here, transformer_config
from megagrpo.config.actor import ActorConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.build import build_chunks, chunk_parameters, load_hf
from megagrpo.models.table import model_tensors
from megagrpo.weights.copies.recorder import Copy, record_whole
from tests.pretended_groups import only_fake_groups

META = torch.device("meta")


def record_trainer_rank(arch: Architecture, config: ActorConfig, rank: int) -> tuple[dict[str, int], list[Copy]]:
    """The indices of a rank among the ranks of "tp", "pp" and "ep" in Megatron, and its copies from an HF model."""
    dtype = getattr(torch, config.dtype)
    tensors = {
        spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype) if spec.dtype else dtype, device=META)
        for spec in model_tensors(arch)
    }
    with pretended_world(config, rank), META:
        tensor_parallel.model_parallel_cuda_manual_seed(0)  # Megatron reads the state in any case
        kernels = kernels_here(config)
        chunks = build_chunks(arch, config, transformer_config(arch, config, kernels), kernels, META)
        read = _Noting(tensors)  # record_whole makes every tensor it is given
        load_hf(chunks, arch, read)
        specs = {name: (tuple(tensors[name].shape), tensors[name].dtype) for name in read.names}
        copies = record_whole(lambda hf: load_hf(chunks, arch, hf), specs, chunk_parameters(chunks)).copies
        indices = {
            "tp": mpu.get_tensor_model_parallel_rank(),
            "pp": mpu.get_pipeline_model_parallel_rank(),
            "ep": mpu.get_expert_model_parallel_rank(),
        }
    return indices, copies


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
    """HF tensors that notes which of them are read."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__(tensors)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return super().__getitem__(name)
