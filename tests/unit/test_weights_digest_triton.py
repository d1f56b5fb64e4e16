"""The CUDA kernel of the digest where there is Triton but no GPU: interpreted, and compiled for a GPU elsewhere.

tests/gpu runs it on one.
"""

import importlib.util

import pytest

from megagrpo.system.environment import child_environment
from tests.experiments import ROOT, python

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no Triton: it comes with torch for CUDA (pip install triton)"
)

INTERPRET = """
import itertools, torch
from megagrpo.weights.digests.digest import _odd, batched_digest, index_seed
from megagrpo.weights.digests.triton_kernel import fused_digest
from megagrpo.weights.copies.views import Box

draw = torch.Generator().manual_seed(0)
dtypes = (torch.int8, torch.int16, torch.int32, torch.int64)
sizes = ((5,), (5000,), (3, 7), (20, 260), (40, 3), (33, 1), (1, 1), (0, 4), (4, 0), (2, 17, 9))
count = 0
for dtype, size in itertools.product(dtypes, sizes):
    limits, start = torch.iinfo(dtype), tuple(range(3, 3 + len(size)))
    values = torch.randint(limits.min, limits.max, (4, *size), generator=draw).to(dtype)
    layouts = [values, values[::2], values[:1].expand(3, *size)]  # every other slice, and the same one three times
    if len(size) > 1:
        layouts += [values.transpose(*dims).contiguous().transpose(*dims) for dims in ((-1, -2), (0, 1))]
    for layout in layouts:
        last = range(len(size))[-2:]
        found = fused_digest(layout, *(index_seed(start[k], k) for k in last))
        if len(size) == 3:
            found = (found * _odd(start[0], size[0], 0, layout.device, 0)).sum(-1)
        assert torch.equal(found, batched_digest(layout, Box(start, size))), (dtype, size, layout.stride())
        count += 1
print(count, "layouts")
"""

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megagrpo.weights.digests.triton_kernel import _block_sums

types = {"bits": "*i16", "sums": "*i64", "row_seed": "i64", "column_seed": "i64", "column_stride": "constexpr"}
types |= {"WEIGH_ROWS": "constexpr", "ROWS": "constexpr", "COLUMNS": "constexpr"}
signature = {name: types.get(name, "i32") for name in _block_sums.arg_names}
values = {"column_stride": 1, "WEIGH_ROWS": True, "ROWS": 16, "COLUMNS": 256}
constants = {(_block_sums.arg_names.index(name),): value for name, value in values.items()}
aligned = {(k,): [["tt.divisibility", 16]] for k, kind in enumerate(signature.values()) if kind in ("*i16", "i32")}
source = ASTSource(_block_sums, signature, constants, aligned)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
assert "ld.global.v4.b32" in kernel.asm["ptx"], "sixteen bytes a load"
print(len(kernel.asm["cubin"]), "bytes")
"""


def run(code: str, **environment: str) -> str:
    return python("-c", code, env=child_environment() | environment, cwd=ROOT)


def test_the_interpreted_kernel_has_the_same_bits():
    assert run(INTERPRET, TRITON_INTERPRET="1") == "184 layouts"


def test_the_kernel_compiles_and_reads_sixteen_bytes_at_once():
    assert run(COMPILE).endswith("bytes")
