"""What does it take to load an FP8 checkpoint under TP2 x EP2: bytes read, memory held, and is it
the bfloat16 twin?

    python bench/fp8_loading.py [--hidden 1024] [--layers 4]

Writes a random DeepSeek-V3 model in FP8 (blocks of 128 x 128, partial ones among them) and its
bfloat16 twin, loads both on 2 and on 4 ranks, and compares every element. Writes
bench/results/fp8_loading.{json,md}; ends with status 1 where an element differs, the ranks read 5 %
more than their parts of the files, or one holds more than the bounded buffer beside its parameters.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from common import provenance, write_results

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.weights.hf_folder import HfFolder
from tests.dist.workers.launch import POOL, run_ranks
from tests.fp8_checkpoint import quantise_folder

BLOCK = (128, 128)
LAYOUT = {"tp": 2, "ep": 2}
REPEATED = ("norm", "mlp.gate.", "q_a_proj", "kv_a_proj")  # by both tensor-parallel ranks
ALLOWED = 8 << 20  # bytes of the interpreter and the allocator beside the buffer
HEADER = (
    "ranks", "elements differ", "files GB", "parts GB", "read GB", "read / parts", "from disk GB",
    "a rank's parameters GB", "held beside them MB", "buffer MB", "seconds", "GB/s a rank",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        _write_models(folder, args.hidden, args.layers)
        runs = [_run(folder, world) for world in (2, 4)]
    POOL.stop()
    buffer = (
        BLOCK[0] * (4 * args.hidden + 64) * 8
    )  # two rows of blocks of the widest matrix, in float32
    data = provenance() | {
        "hidden": args.hidden,
        "layers": args.layers,
        "buffer": buffer,
        "runs": runs,
    }
    write_results("fp8_loading", data, HEADER, [_line(run, buffer) for run in runs])
    if any(not _good(run, buffer) for run in runs):
        sys.exit("not as wanted, see above")


def _write_models(folder: Path, hidden: int, layers: int) -> None:
    sizes = TinyModelConfig(
        path=str(folder / "float32"),
        family="deepseek_v3",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=16,
        num_kv_heads=16,
        head_dim=72,
        ffn_size=4 * hidden + 64,
        num_experts=16,
        experts_per_token=2,
        expert_ffn_size=hidden + 72,
        tie_embeddings=False,
    )
    make_tiny_model(sizes, seed=0)
    quantise_folder(folder / "float32", folder / "model", folder / "twin", BLOCK)


def _run(folder: Path, world: int) -> dict:
    """Two ranks hold one replica of the model, four hold two, of which experts have one on every
    pair."""
    job = {
        "model": str(folder / "model"),
        "twin": str(folder / "twin"),
        "parallel": LAYOUT,
        "dtype": "bfloat16",
    }
    (result,) = run_ranks(world, folder / f"ranks{world}", [job], script="fp8_ranks.py")
    whole = HfFolder(folder / "model")
    stored = {name: whole.stored_bytes(name, shape) for name, (shape, _) in whole.specs.items()}
    parts = sum(
        size * (2 if any(word in name for word in REPEATED) else 1) for name, size in stored.items()
    )
    return {"world": world, "files": sum(stored.values()), "parts": parts * world // 2, **result}


def _good(run: dict, buffer: int) -> bool:
    ranks = run["ranks"]
    few = sum(rank["bytes_read"] for rank in ranks) <= 1.05 * run["parts"]
    return few and all(rank["equal"] and rank["held"] <= buffer + ALLOWED for rank in ranks)


def _line(run: dict, buffer: int) -> tuple[str, ...]:
    ranks, read = run["ranks"], sum(rank["bytes_read"] for rank in run["ranks"])
    seconds = max(rank["seconds"] for rank in ranks)
    return (
        str(run["world"]),
        "none" if all(rank["equal"] for rank in ranks) else "some",
        f"{run['files'] / 1e9:.3f}",
        f"{run['parts'] / 1e9:.3f}",
        f"{read / 1e9:.3f}",
        f"{read / run['parts']:.4f}",
        f"{sum(rank['bytes_from_disk'] for rank in ranks) / 1e9:.3f}",
        f"{max(rank['share'] for rank in ranks) / 1e9:.3f}",
        f"{max(rank['held'] for rank in ranks) / 1e6:.1f}",
        f"{buffer / 1e6:.1f}",
        f"{seconds:.2f}",
        f"{read / len(ranks) / seconds / 1e9:.2f}",
    )


if __name__ == "__main__":
    main()
