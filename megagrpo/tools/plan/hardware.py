"""What plans read of config/hardware.py, and the estimates that no data sheet has."""

from megagrpo.config.hardware import HARDWARE, Hardware

# Estimates; without an auxiliary loss and replay the fullest expert rank gets this many times the
# mean of tokens.
EXPERT_IMBALANCE = 1.3
# share of memory that PyTorch's allocator cannot use, with expandable segments
FRAGMENTATION = 0.04
# between a GPU and its host's pinned memory: PCIe 5.0 x16, 63 GB/s in one direction
HOST_GB_S = 55.0
HOST_MEMORY_GB_S = 400.0  # of a node's own memory, for Adam on the host: two sockets, estimated
CONTEXT_BYTES = 1.5e9  # CUDA context, NCCL communicators and library handles before the weights


def gigabytes(number: float) -> str:
    """Returns bytes as text with three digits and the unit that suits them."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e3:.3g} kB"


def usable_bytes(hardware: Hardware) -> float:
    """Returns the bytes of a GPU that a trainer rank can fill: without its context and what
    fragments."""
    return (hardware.memory_bytes - CONTEXT_BYTES) * (1 - FRAGMENTATION)


def hardware_of(name: str) -> Hardware:
    """Returns a row of HARDWARE. Raises ValueError naming the rows."""
    if name not in HARDWARE:
        raise ValueError(f"--hardware {name} is not in the table, which has {', '.join(HARDWARE)}")
    return HARDWARE[name]
