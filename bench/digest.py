"""How fast are digests? Slices like an engine's, in one run: this digest, a hash of every element, and reading alone.

    python bench/digest.py [--threads 1] [--device cpu]

The hash of every element is what commit 51f2e56 computed: mix64 of the element's linear index as its multiplier.
Reading is torch's own sum of the same bits as integers. Writes bench/results/digest.{json,md}.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import provenance, write_results

sys.path.insert(0, str(Path(__file__).parents[1]))
from megagrpo.weights.digest import slice_digest
from megagrpo.weights.views import Box

SHAPES = {
    "matrix of a dense layer": (4096, 2048),
    "expert's matrix": (768, 2048),
    "narrow columns": (8192, 96),
    "norm": (4096,),
}
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
HEADER = ("slice", "dtype", "this digest, M elements/s", "hash of every element, M/s", "ratio", "reading, M/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for name, shape in SHAPES.items():
        for dtype, integer in INTEGERS.items():
            values = torch.randn(shape, device=args.device).to(dtype)
            box = Box((3,) * len(shape), shape)
            speed = {
                "digest": _speed(values, lambda v=values, b=box: slice_digest(v, b)),
                "hash": _speed(values, lambda v=values: _hash_of_every_element(v)),
                "read": _speed(values, lambda v=values, i=integer: v.view(i).sum()),
            }
            rows.append({"slice": f"{name} {list(shape)}", "dtype": str(dtype).removeprefix("torch."), **speed})
    data = {**provenance(), "threads": args.threads, "device": args.device, "rows": rows}
    write_results("digest", data, HEADER, [_line(row) for row in rows])


def _speed(values: torch.Tensor, work: Callable[[], torch.Tensor]) -> float:
    """Returns elements a second: the best of five, each of at least 50 ms."""
    int(work())
    best = 0.0
    for _ in range(5):
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < 0.05:
            int(work())  # also waits for a GPU
            count += 1
        best = max(best, count * values.numel() / (time.perf_counter() - start))
    return best


def _line(row: dict) -> tuple[str, ...]:
    digest, hashed, read = (row[name] / 1e6 for name in ("digest", "hash", "read"))
    return row["slice"], row["dtype"], f"{digest:,.0f}", f"{hashed:,.0f}", f"{digest / hashed:.1f}", f"{read:,.0f}"


def _hash_of_every_element(values: torch.Tensor, chunk: int = 1 << 20) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    bits = values.reshape(-1).view(INTEGERS[values.dtype])
    mask = (1 << 8 * values.element_size()) - 1
    for first in range(0, bits.numel(), chunk):
        part = bits[first : first + chunk].to(torch.int64) & mask
        x = torch.arange(first, first + len(part), dtype=torch.int64, device=values.device) + 0x1E3779B97F4A7C15
        x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * 0x3F58476D1CE4E5B9
        x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * 0x14D049BB133111EB
        x = (x ^ ((x >> 31) & ((1 << 33) - 1))).bitwise_or_(1)
        total += (x * (part + 1)).sum()
    return total


if __name__ == "__main__":
    main()
