"""What the figures were measured on: device, driver, libraries."""

import platform
from importlib import metadata

import torch

from bench.gpu_kit.figures import Figures, Setting

LIBRARIES = (
    "megatron-core",
    "transformers",
    "triton",
    "transformer_engine",
    "sglang",
    "sglang-kernel",
    "flash_attn",
    "liger_kernel",
    "cut_cross_entropy",
    "ray",
)


def surroundings(figures: Figures, setting: Setting) -> None:
    """Names device, driver and versions. Where CUDA was asked for and is not there it fails, with
    the reason."""
    figures.add("torch", torch.__version__, note=f"built for CUDA {torch.version.cuda}")
    figures.add("Python", platform.python_version())
    for name in LIBRARIES:
        try:
            figures.add(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            figures.add(name, None, note="not installed")
    if setting.device == "cpu":
        figures.add("device", "cpu")
        return
    torch.cuda.init()  # says why it cannot
    properties = torch.cuda.get_device_properties(0)
    figures.add("device", properties.name)
    figures.add("driver", _driver())
    figures.add("capability", f"{properties.major}.{properties.minor}")
    figures.add("multiprocessors", properties.multi_processor_count)
    free, total = torch.cuda.mem_get_info()
    figures.add("memory", total / 2**30, "GiB", f"{free / 2**30:.1f} GiB free")
    figures.add("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    figures.add("copy on the device", _copy_gb_s(), "GB/s", "read and written")
    figures.add("bf16 matrix product", _product_tflops(), "TFLOP/s", "8192 x 8192 x 8192")


def _driver() -> str:
    """Returns the driver's version from the kernel module's own file, or from nvidia-smi."""
    import subprocess
    from pathlib import Path

    file = Path("/proc/driver/nvidia/version")
    if file.exists():
        words = file.read_text().split()
        return next(
            (word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()),
            "unknown",
        )
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return (
            subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
            or "unknown"
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def _copy_gb_s() -> float:
    from bench.gpu_kit.timing import seconds_of

    source = torch.randint(0, 100, (1 << 28,), device="cuda", dtype=torch.int32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), source.device) / 1e9


def _product_tflops() -> float:
    from bench.gpu_kit.timing import seconds_of

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds_of(lambda: a @ b, a.device) / 1e12
