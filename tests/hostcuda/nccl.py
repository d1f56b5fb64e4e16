"""torch's ProcessGroupNCCL, played over gloo by device/nccl.h."""

from datetime import timedelta
from types import SimpleNamespace

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.hostcuda.cuda import host

CONFIG = ("blocking", "cga_cluster_size", "max_ctas", "min_ctas", "net_name")


class Options:
    """What a group is made with."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(**dict.fromkeys(CONFIG))
        self.group_name, self.global_ranks_in_group = "", []
        self._timeout = timedelta(minutes=10)


class _AnyOf(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, host().Nccl)


class ProcessGroupNCCL(metaclass=_AnyOf):
    """Makes a group, whose communicator is made by its first operation."""

    Options = Options

    def __new__(cls, store, rank: int, size: int, options: Options | None = None):
        options = options or Options()

        def communicator():
            own = dist.ProcessGroupGloo._Options()
            own._timeout = options._timeout
            own._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            return dist.ProcessGroupGloo(dist.PrefixStore("played/", store), rank, size, own)

        group = host().Nccl(rank, size, communicator)
        group.options = options
        return group


def _set_default_timeout(group, limit: timedelta) -> None:
    group.set_timeout(limit)


def install() -> None:
    """Makes torch.distributed find NCCL."""
    host().register_nccl()
    host().Nccl._set_default_timeout = _set_default_timeout
    host().Nccl._group_start = host().Nccl._group_end = lambda self: None  # around aborts
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    c10d.is_nccl_available = dist.is_nccl_available = lambda: True
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
