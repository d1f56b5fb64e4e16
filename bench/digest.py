"""How fast are digests and their comparison? Slices like those of a large model, in one run with
what was there before.

    python bench/digest.py [--threads 1] [--device cpu] [--parts slices batches comparison]

- One slice: this digest, the hash of every element of commit 51f2e56 (mix64 of its linear index),
  and reading alone (torch's own sum of the same bits as integers). bench/results/digest.{json,md}
- Slices that lie alike in one tensor: a call for each, and one for all.
  bench/results/digest_batches.{json,md}
- Rank 0 compares the digests of a Qwen3-235B in all engines: Python per slice (commits 51f2e56 to
  e926dc2: integers in JSON, a dictionary of slices) and arrays.
  bench/results/digest_comparison.{json,md}
"""

import argparse
import base64
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from common import provenance, write_results

sys.path.insert(0, str(Path(__file__).parents[1]))
from megagrpo.weights.copies.record import Copy
from megagrpo.weights.copies.views import Box
from megagrpo.weights.digests.digest import batched_digest, slice_digest
from megagrpo.weights.expected_digests import ExpectedDigests
from megagrpo.weights.wire.mailbox import decode, encode

SHAPES = {
    "matrix of a dense layer": (4096, 2048),
    "expert's matrix": (768, 2048),
    "narrow columns": (8192, 96),
    "norm": (4096,),
}
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
BATCHES = {
    "experts of a layer": (128, 768, 2048),
    "small experts": (128, 64, 96),
    "norms of all layers": (94, 4096),
    "norms of heads": (94, 128),
}
LAYERS, EXPERTS, HIDDEN, EXPERT_INNER = 94, 128, 4096, 1536  # Qwen3-235B-A22B
FLEETS = {
    "8 engines, TP8 with EP8": (8, 8),
    "32 engines, TP8 with EP8": (32, 8),
    "16 engines, TP8 without EP": (16, 1),
}
TP = 8
PARTS = ("slices", "batches", "comparison")
HEADER = (
    "slice",
    "dtype",
    "this digest, M elements/s",
    "hash of every element, M/s",
    "ratio",
    "reading, M/s",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = {**provenance(), "threads": args.threads, "device": args.device}
    if "slices" in args.parts:
        rows = _slices(args.device)
        write_results("digest", data | {"rows": rows}, HEADER, [_line(row) for row in rows])
    if "batches" in args.parts:
        rows = _batches(args.device)
        header = ("slices", "a call each, M elements/s", "one call, M elements/s", "ratio")
        write_results(
            "digest_batches", data | {"rows": rows}, header, [_batch_line(row) for row in rows]
        )
    if "comparison" in args.parts:
        rows = [_comparison(name, *fleet) for name, fleet in FLEETS.items()]
        head = (
            "fleet",
            "slices",
            "Python per slice, s a publish",
            "arrays, s a publish",
            "ratio",
            "once an engine, s",
        )
        write_results(
            "digest_comparison",
            data | {"rows": rows},
            head,
            [_comparison_line(row) for row in rows],
        )


def _slices(device: str) -> list[dict]:
    rows = []
    for name, shape in SHAPES.items():
        for dtype, integer in INTEGERS.items():
            values = torch.randn(shape, device=device).to(dtype)
            box = Box((3,) * len(shape), shape)
            speed = {
                "digest": _speed(values, lambda v=values, b=box: slice_digest(v, b)),
                "hash": _speed(values, lambda v=values: _hash_of_every_element(v)),
                "read": _speed(values, lambda v=values, i=integer: v.view(i).sum()),
            }
            rows.append(
                {
                    "slice": f"{name} {list(shape)}",
                    "dtype": str(dtype).removeprefix("torch."),
                    **speed,
                }
            )
    return rows


def _batches(device: str) -> list[dict]:
    rows = []
    for name, (count, *shape) in BATCHES.items():
        values = torch.randn(count, *shape, device=device, dtype=torch.bfloat16)
        box = Box((3,) * len(shape), tuple(shape))
        each = lambda v=values, b=box: torch.stack([slice_digest(part, b) for part in v])  # noqa: E731
        together = lambda v=values, b=box: batched_digest(v, b)  # noqa: E731
        assert torch.equal(each(), together())
        speed = {
            "each": _speed(values, lambda e=each: e()[0]),
            "together": _speed(values, lambda t=together: t()[0]),
        }
        rows.append({"slices": f"{name} [{count}, {', '.join(map(str, shape))}] bfloat16", **speed})
    return rows


def _comparison(name: str, engines: int, ep: int) -> dict:
    """Seconds on rank 0 for a fleet's answers, decoded and compared. Every engine has objects of
    its own."""
    ranks = [_copies(rank, ep) for rank in range(TP)]
    names = dict.fromkeys(copy.hf for copies in ranks for copy in copies)
    mesh = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    expected = ExpectedDigests(SimpleNamespace(mesh=mesh, copies=[[]], specs={}))
    expected._share = {hf: [] for hf in names}  # nothing is digested here: any numbers will do
    numbers = expected.add(ranks)
    values = np.random.default_rng(0).integers(-(2**63), 2**63, len(expected._index))
    by_slice = {
        copy.source: int(value)
        for copies, of_rank in zip(ranks, numbers, strict=True)
        for copy, value in zip(copies, values[of_rank], strict=True)
    }
    spent, slices = {"python": 0.0, "arrays": 0.0, "places": 0.0}, 0
    for _ in range(engines):
        for rank in range(TP):
            copies = _copies(rank, ep)
            sources = [copy.source for copy in copies]
            slices += len(copies)
            truth = [by_slice[source] for source in sources]
            answer = encode({"digests": truth})
            start = time.perf_counter()
            unknown = [source for source in dict.fromkeys(sources) if source not in by_slice]
            found = decode(answer)["digests"]
            problems = [
                k for k, digest in zip(sources, found, strict=True) if digest != by_slice[k]
            ]
            spent["python"] += time.perf_counter() - start
            assert not unknown and not problems
            start = time.perf_counter()
            (places,) = expected.add([copies])
            spent["places"] += time.perf_counter() - start
            answer = encode(
                {"digests": base64.b64encode(np.array(truth, dtype="<i8").tobytes()).decode()}
            )
            start = time.perf_counter()
            digests = np.frombuffer(base64.b64decode(decode(answer)["digests"]), dtype="<i8")
            wrong = np.flatnonzero(digests != values[places])
            spent["arrays"] += time.perf_counter() - start
            assert not len(wrong)
    return {"fleet": name, "engines": engines, "slices": slices, **spent}


def _copies(rank: int, ep: int) -> list[Copy]:
    """What one engine rank holds of the model: whole experts with EP, a slice of every expert
    without."""
    found = []

    def add(hf: str, size: tuple[int, ...], cut: int | None) -> None:
        """`cut`: the dimension along which ranks divide the tensor."""
        size = tuple(n // TP if k == cut else n for k, n in enumerate(size))
        start = tuple(rank * n if k == cut else 0 for k, n in enumerate(size))
        found.append(Copy(hf, start, size, hf, 0, tuple(reversed(size))))

    for hf, cut in (
        ("model.embed_tokens.weight", 0),
        ("lm_head.weight", 0),
        ("model.norm.weight", None),
    ):
        add(hf, (151_936, HIDDEN) if cut == 0 else (HIDDEN,), cut)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for part, size, cut in (
            ("self_attn.q_proj", (8192, HIDDEN), 0),
            ("self_attn.k_proj", (512, HIDDEN), 0),
            ("self_attn.v_proj", (512, HIDDEN), 0),
            ("self_attn.o_proj", (HIDDEN, 8192), 1),
            ("self_attn.q_norm", (128,), None),
            ("self_attn.k_norm", (128,), None),
            ("input_layernorm", (HIDDEN,), None),
            ("post_attention_layernorm", (HIDDEN,), None),
            ("mlp.gate", (EXPERTS, HIDDEN), None),
        ):
            add(f"{prefix}.{part}.weight", size, cut)
        mine = range(rank * EXPERTS // ep, (rank + 1) * EXPERTS // ep) if ep > 1 else range(EXPERTS)
        for expert in mine:
            for part in ("gate_proj", "up_proj", "down_proj"):
                size = (HIDDEN, EXPERT_INNER) if part == "down_proj" else (EXPERT_INNER, HIDDEN)
                add(
                    f"{prefix}.mlp.experts.{expert}.{part}.weight",
                    size,
                    None if ep > 1 else int(part == "down_proj"),
                )
    return found


def _batch_line(row: dict) -> tuple[str, ...]:
    each, together = row["each"], row["together"]
    return row["slices"], f"{each / 1e6:,.0f}", f"{together / 1e6:,.0f}", f"{together / each:.1f}"


def _comparison_line(row: dict) -> tuple[str, ...]:
    python, arrays, places = row["python"], row["arrays"], row["places"] / row["engines"]
    cells = (
        f"{row['slices']:,}",
        f"{python:.2f}",
        f"{arrays:.3f}",
        f"{python / arrays:,.0f}",
        f"{places:.3f}",
    )
    return row["fleet"], *cells


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
    return (
        row["slice"],
        row["dtype"],
        f"{digest:,.0f}",
        f"{hashed:,.0f}",
        f"{digest / hashed:.1f}",
        f"{read:,.0f}",
    )


def _hash_of_every_element(values: torch.Tensor, chunk: int = 1 << 20) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    bits = values.reshape(-1).view(INTEGERS[values.dtype])
    mask = (1 << 8 * values.element_size()) - 1
    for first in range(0, bits.numel(), chunk):
        part = bits[first : first + chunk].to(torch.int64) & mask
        x = (
            torch.arange(first, first + len(part), dtype=torch.int64, device=values.device)
            + 0x1E3779B97F4A7C15
        )
        x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * 0x3F58476D1CE4E5B9
        x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * 0x14D049BB133111EB
        x = (x ^ ((x >> 31) & ((1 << 33) - 1))).bitwise_or_(1)
        total += (x * (part + 1)).sum()
    return total


if __name__ == "__main__":
    main()
