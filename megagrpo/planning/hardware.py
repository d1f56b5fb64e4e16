"""What a GPU of each kind can do at best, and what share of it programs reach: every number with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rates:
    """A bandwidth table: what links carry at best, and what share of it transfers reach."""

    between_gb_s: float  # of one rank, to and from other nodes
    inside_gb_s: float  # of one rank, to and from the ranks of its node
    efficiency: float = 0.8
    message_us: float = 20.0  # that a rank needs for each message
    call_ms: float = 5.0  # of one HTTP call to an engine


@dataclass(frozen=True)
class Hardware:
    """A GPU of a node of eight with one 400 Gb/s network card for each: bandwidths in one direction."""

    device_name: str  # as the driver calls it
    memory_mib: int  # as nvidia-smi prints it
    capability: tuple[int, int]
    processors: int  # streaming multiprocessors
    bf16_tflops: float  # dense, without sparsity
    memory_tb_s: float
    rates: Rates
    source: str

    @property
    def memory_bytes(self) -> int:
        """Counts the bytes of the GPU's memory."""
        return self.memory_mib * 2**20


_NIC = "NVIDIA ConnectX-7, 400 Gb/s a GPU, as in the DGX H100 and DGX B200 data sheets"
HARDWARE = {
    "H100": Hardware(
        "NVIDIA H100 80GB HBM3", 81_559, (9, 0), 132, 989, 3.35, Rates(between_gb_s=50, inside_gb_s=450),
        f"NVIDIA H100 data sheet, SXM: 1,979 TFLOPS bf16 with sparsity, 3.35 TB/s, NVLink 900 GB/s both ways; {_NIC}",
    ),
    "H200": Hardware(
        "NVIDIA H200", 143_771, (9, 0), 132, 989, 4.8, Rates(between_gb_s=50, inside_gb_s=450),
        f"NVIDIA H200 data sheet, SXM: 1,979 TFLOPS bf16 with sparsity, 4.8 TB/s, NVLink 900 GB/s both ways; {_NIC}",
    ),
    "H20": Hardware(
        "NVIDIA H20", 97_871, (9, 0), 78, 148, 4.0, Rates(between_gb_s=50, inside_gb_s=450),
        f"published specification of the H20: 148 TFLOPS bf16, 96 GB, 4.0 TB/s, NVLink 900 GB/s both ways; {_NIC}",
    ),
    "B200": Hardware(
        "NVIDIA B200", 183_359, (10, 0), 148, 2250, 8.0, Rates(between_gb_s=50, inside_gb_s=900),
        f"NVIDIA DGX B200 data sheet: 36 PFLOPS bf16 with sparsity, 64 TB/s and NVLink 14.4 TB/s of 8 GPUs; {_NIC}",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A number that no data sheet has, and where it is from. `fitted`: chosen so that a published result comes out."""

    value: float
    source: str
    fitted: bool = False


# What programs reach of the numbers above, and what they wait for. docs/planning.md says in which formula each stands.
EFFICIENCY = {
    "matmul": Measured(
        0.60,
        "estimate from the Llama 3 paper (arXiv 2407.21783, table 4): 0.38 to 0.43 of the peak on H100, bf16, with all "
        "communication and bubbles included; matrix products alone are taken as 1.4 to 1.5 times that",
    ),
    "experts": Measured(
        0.45,
        "NeMo AutoModel's performance summary (April 2026, H100, bf16): Qwen3 30B-A3B on 8 GPUs with ep 8 reaches 277 "
        "TFLOPS a GPU, all-to-all included",
        fitted=True,
    ),
    "experts one by one": Measured(
        0.20, "estimate: without Transformer Engine a rank's experts are multiplied one after the other"
    ),
    "attention": Measured(
        0.50,
        "estimate from the FlashAttention-3 paper (arXiv 2407.08608): up to 740 TFLOPS (0.75 of the peak) forward; "
        "backward, causal masks and the lengths of packed samples reach less",
    ),
    "memory": Measured(
        0.70, "estimate: large copies reach 0.90 of HBM's bandwidth, experts with few tokens each and short caches less"
    ),
    "decode matmul": Measured(0.50, "estimate: skinny matrix products of a decode batch of some hundred rows"),
    "nvlink": Measured(
        0.75,
        "estimate: NCCL's ring inside a node, large messages, without NVLink SHARP",
    ),
    "network": Measured(
        0.80,
        "DeepEP V1 (docs/legacy.md): 43 GB/s between two nodes of H800 with 400 Gb/s cards; NCCL is taken as less",
    ),
    "all-to-all inside": Measured(
        0.34,
        "DeepEP V1 (docs/legacy.md): 153 to 158 GB/s in a node of H800, whose links have 160; the same for NCCL on 450",
    ),
    "all-to-all between": Measured(
        0.50,
        "estimate: NCCL's plain all-to-all between nodes, in which each token travels once for each of its experts",
    ),
    "all-reduce latency us": Measured(12.0, "estimate: SGLang's one-shot all-reduce of some hundred kB inside a node"),
    "all-reduce latency between us": Measured(45.0, "estimate: NCCL's tree over two to four nodes, small messages"),
    "decode step ms": Measured(
        2.0, "estimate: scheduling, sampling and the gaps between CUDA graphs of one decode step; overlapped in part"
    ),
    "decode layer us": Measured(
        60.0, "estimate: kernels of a layer in a decode step that do not get shorter however few samples there are"
    ),
    "layer overhead us": Measured(
        60.0,
        "estimate: launches and synchronisations of one layer's forward in training that no kernel hides "
        "(router, permutation, token counts that the host waits for)",
    ),
    "expert imbalance": Measured(
        1.3, "estimate: tokens of the fullest expert rank over the mean, without an auxiliary loss and without replay"
    ),
    "fragmentation": Measured(0.04, "estimate: memory that PyTorch's allocator cannot use, with expandable segments"),
    "host copy GB/s": Measured(20.0, "estimate: from a GPU to its host's memory, all of a node at once, PCIe 5 x16"),
    "context bytes": Measured(
        1.5e9, "estimate: CUDA context, NCCL communicators and library handles of an engine rank before the weights"
    ),
}


def efficiency(name: str) -> float:
    """Returns one row of EFFICIENCY."""
    return EFFICIENCY[name].value


def hardware_of(name: str) -> Hardware:
    """Returns a row of HARDWARE. Raises ValueError naming the rows there are."""
    if name not in HARDWARE:
        raise ValueError(f"--hardware {name} is not in the table, which has {', '.join(HARDWARE)}")
    return HARDWARE[name]


def rates_of(name: str, changes: Mapping[str, float | None]) -> Rates:
    """Returns the links of a row of HARDWARE with those of `changes` that are not None. Raises ValueError."""
    given = {key: value for key, value in changes.items() if value is not None}
    for key, value in given.items():
        if value < 0 or (value == 0 and key not in ("message_us", "call_ms")):
            raise ValueError(f"--{key.replace('_', '-')} {value:g} must be positive")
    return replace(hardware_of(name).rates, **given)
