"""Peak rates and memory of each kind of GPU, with their sources."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Bandwidths of a rank's links at best."""

    between_gb_s: float  # of one rank, to and from other nodes
    inside_gb_s: float  # of one rank, to and from the ranks of its node


@dataclass(frozen=True)
class Hardware:
    """A GPU of a node of eight with one 400 Gb/s network card for each: bandwidths in one
    direction."""

    device_name: str  # as the driver calls it
    memory_mib: int  # as nvidia-smi prints it
    capability: tuple[int, int]
    processors: int  # streaming multiprocessors
    bf16_tflops: float  # dense, without sparsity
    fp32_tflops: float  # without tensor cores, as torch multiplies float32
    memory_tb_s: float
    rates: Rates

    def peak(self, width: int) -> float:
        """Returns the peak in FLOPs per second for values of `width` bytes."""
        return (self.bf16_tflops if width == 2 else self.fp32_tflops) * 1e12

    @property
    def memory_bytes(self) -> int:
        """Counts the bytes of the GPU's memory."""
        return self.memory_mib * 2**20


# Between nodes: NVIDIA ConnectX-7, 400 Gb/s a GPU, as in the DGX H100 and DGX B200 data sheets.
HARDWARE = {
    # NVIDIA H100 data sheet, SXM: 1,979 TFLOPS bf16 with sparsity, 67 fp32, 3.35 TB/s,
    # NVLink 900 GB/s both ways
    "H100": Hardware("NVIDIA H100 80GB HBM3", 81_559, (9, 0), 132, 989, 67, 3.35, Rates(50, 450)),
    # NVIDIA H200 data sheet, SXM: 1,979 TFLOPS bf16 with sparsity, 67 fp32, 4.8 TB/s,
    # NVLink 900 GB/s both ways
    "H200": Hardware("NVIDIA H200", 143_771, (9, 0), 132, 989, 67, 4.8, Rates(50, 450)),
    # published specification of the H20: 148 TFLOPS bf16, 44 fp32, 96 GB, 4.0 TB/s, NVLink
    # 900 GB/s both ways
    "H20": Hardware("NVIDIA H20", 97_871, (9, 0), 78, 148, 44, 4.0, Rates(50, 450)),
    # NVIDIA DGX B200 data sheet: 36 PFLOPS bf16 with sparsity, 600 TFLOPS fp32, 64 TB/s and
    # NVLink 14.4 TB/s of 8 GPUs
    "B200": Hardware("NVIDIA B200", 183_359, (10, 0), 148, 2250, 75, 8.0, Rates(50, 900)),
}


def hardware_called(device_name: str) -> Hardware | None:
    """Returns the row of the GPU that the driver calls so, if there is one."""
    return next((row for row in HARDWARE.values() if row.device_name == device_name), None)
