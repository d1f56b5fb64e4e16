"""Speed of what a publish does on the device: digests, and packing and unpacking of the exchange's
buckets."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from bench.gpu_kit.figures import Figures, Setting
from bench.gpu_kit.timing import seconds_of
from megagrpo.weights.copies.views import Box, ParameterSlice
from megagrpo.weights.digests import digest
from megagrpo.weights.digests.digest import batched_digest
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.engine_group import EngineGroup, Receive, Send
from megagrpo.weights.wire.moving import receive_batches, send_batches
from megagrpo.weights.wire.transfer_messages import Message

# slices alike in one parameter: [slices, rows, columns]
DIGESTED = {
    "experts of a layer": (128, 1536, 4096),
    "narrow columns": (64, 8192, 96),
    "matrix": (1, 8192, 4096),
    "norms": (94, 4096),
}
SMALL = {
    "experts of a layer": (8, 48, 64),
    "narrow columns": (4, 64, 6),
    "matrix": (1, 64, 64),
    "norms": (4, 64),
}
_SAMPLE = 4  # slices whose digests are compared with the CPU's


def digests(figures: Figures, setting: Setting) -> None:
    """Measures digests of bfloat16 slices, by Triton's kernel and by plain torch, whose bits must
    be the CPU's."""
    device = setting.torch_device()
    kernels = {"plain torch": False}
    if device.type == "cuda":
        kernels = {"Triton" if digest._has_triton() else "no Triton": True, **kernels}
    for title, shape in setting.of(DIGESTED, SMALL).items():
        values = torch.randn(shape, device=device, dtype=torch.float32).bfloat16()
        box = Box((3,) * (len(shape) - 1), tuple(shape[1:]))
        expected = batched_digest(values[:_SAMPLE].cpu(), box)
        for kernel, fused in kernels.items():
            digest._has_triton.cache_clear()
            has_triton = digest._has_triton
            if not fused:
                digest._has_triton = cast(Any, lambda: False)
            try:
                wrong = int((batched_digest(values, box)[:_SAMPLE].cpu() != expected).sum())
                seconds = seconds_of(lambda v=values, b=box: batched_digest(v, b), device)
            finally:
                digest._has_triton = has_triton
            size = "x".join(map(str, shape))
            figures.add(f"{title} [{size}], {kernel}", values.nbytes / seconds / 1e9, "GB/s")
            figures.add(
                "  digests that differ from the CPU's", wrong, "", f"of {len(expected)}", at_most=0
            )


class _NoWire:
    """A group whose messages travel in no time: what is left is packing and unpacking."""

    def start(self, messages: Sequence[Send | Receive]) -> list:
        return []

    def wait(self, works: Sequence, deadline: Deadline) -> None:
        pass


def buckets(figures: Figures, setting: Setting) -> None:
    """Measures both ends of a transfer over a layer's experts: slices of columns, and a cast."""
    device = setting.torch_device()
    count, rows, columns = setting.of((64, 1536, 4096), (4, 48, 64))
    for title, dtype, width in (
        ("half of the columns", torch.bfloat16, columns // 2),
        ("float32 to bfloat16", torch.float32, columns),
    ):
        live = torch.randn(count, rows, columns, device=device).to(dtype)
        parameters: Mapping[str, Tensor] = {"experts": live}
        places = [
            ParameterSlice("experts", k * rows * columns, (rows, width), (columns, 1))
            for k in range(count)
        ]
        batches = [
            [Message(peer=1, tag=k, dtype=torch.bfloat16, slices=(place,))]
            for k, place in enumerate(places)
        ]
        moved = 2 * count * rows * width
        send = functools.partial(send_batches, patience_s=60.0)
        for end, move in (("packing", send), ("unpacking", receive_batches)):
            group = cast(EngineGroup, _NoWire())
            seconds = seconds_of(
                lambda m=move, g=group, b=batches, p=parameters: m(g, b, p, Deadline(60.0)),
                device,
            )
            figures.add(
                f"{title}, {end}",
                moved / seconds / 1e9,
                "GB/s",
                f"{moved / 1e9:.2f} GB of bfloat16",
            )
