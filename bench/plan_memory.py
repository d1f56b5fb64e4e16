"""The memory that `megagrpo plan` counts for trainer ranks, beside what real ranks take, on a CPU.

    python bench/plan_memory.py MODEL [--tokens 512] [--ranks 1 2]

MODEL: a folder with the config.json of a model, which is drawn at random; its layers and heads must suit the layouts.
Real ranks make updates in gloo worlds, their live tensors counted, and those that torch's allocator gave; pretended
ones make the same update on shapes. Writes bench/results/plan_memory.{json,md}.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import provenance, write_results
from examples.laptop.recipe import TinyModelConfig
from megagrpo.certify.tiny_model import hf_config
from tests.dist.workers.launch import POOL, run_ranks

HELD = ("parameters", "gradients", "optimiser")
HEADER = (
    "model",
    "layout",
    "options",
    "held, MB",
    "equal",
    "peak of tensors, MB",
    "planned / real",
    "allocator / real",
)
SMALL = {
    1: [("qwen3_moe", {}, {"recompute": name}) for name in ("none", "selective", "full")]
    + [("deepseek_v3", {}, {}), ("glm4_moe", {}, {"dtype": "bfloat16"}), ("mixtral", {}, {"packing": False})],
    2: [
        ("qwen3_moe", {"ep": 2}, {"recompute": "selective"}),
        ("qwen3_moe", {"tp": 2, "ep": 2}, {"recompute": "full"}),
        ("deepseek_v3", {"tp": 2, "ep": 2}, {"recompute": "full"}),
        ("deepseek_v3", {"pp": 2}, {}),
        ("glm4_moe", {"cp": 2}, {}),
        ("llama", {"pp": 2, "vpp": 2}, {"dtype": "bfloat16"}),
        ("llama", {"tp": 2}, {"lora": {"rank": 8}}),
    ],
}
LARGE = {
    1: [({}, {"recompute": name}) for name in ("none", "selective", "full")] + [({}, {"dtype": "bfloat16"})],
    2: [({"pp": 2}, {"recompute": name}) for name in ("none", "full")] + [({"cp": 2}, {})],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-batch of the model")
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), default=[1, 2], help="sizes of worlds")
    arguments = parser.parse_args()
    rows = []
    try:
        with tempfile.TemporaryDirectory() as name:
            for world in arguments.ranks:
                rows += _measure(world, _jobs(world, arguments, Path(name)), Path(name) / f"world{world}")
    finally:
        POOL.stop()
    worst = max(abs(row["planned"] / row["real"] - 1) for row in rows)
    exact = all(row["equal"] for row in rows)
    data = provenance() | {"rows": rows, "largest_difference": worst, "held_equal": exact}
    write_results("plan_memory", data, HEADER, [_line(row) for row in rows])
    sys.exit(not exact or worst > 0.15)


def _jobs(world: int, arguments: argparse.Namespace, folder: Path) -> list[dict]:
    jobs = []
    for family, parallel, options in SMALL[world]:
        path = folder / family
        path.mkdir(exist_ok=True)
        sizes = TinyModelConfig(path=str(path), family=family, hidden_size=64, num_layers=4, head_dim=16)
        (path / "config.json").write_text(json.dumps(hf_config(sizes) | {"vocab_size": 131}))
        actor = {"parallel": parallel, **options}
        jobs.append({"name": f"tiny {family}", "model": str(path), "actor": actor, "lengths": [200, 104, 64]})
    half, quarter = arguments.tokens // 2, arguments.tokens // 4
    for parallel, options in LARGE[world]:
        actor = {"parallel": parallel, **options}
        lengths = [half, quarter, quarter]
        jobs.append({"name": arguments.model.name, "model": str(arguments.model), "actor": actor, "lengths": lengths})
    return jobs


def _measure(world: int, jobs: list[dict], folder: Path) -> list[dict]:
    run_ranks(world, folder, jobs, script="memory_ranks.py")
    rows = []
    for number, job in enumerate(jobs):
        ranks = [json.loads((folder / f"rank{rank}.json").read_text())[number] for rank in range(world)]
        worst = max(ranks, key=lambda rank: abs(rank["pretended"]["two_in_flight"] / rank["real"]["two_in_flight"] - 1))
        real, planned = worst["real"], worst["pretended"]
        peak = max(real["two_in_flight"], real["step"])
        rows.append(
            {
                "model": job["name"],
                "actor": job["actor"],
                "held": sum(real[part] for part in HELD),
                "equal": all(rank["real"][part] == rank["pretended"][part] for rank in ranks for part in HELD),
                "real": real["two_in_flight"],
                "planned": planned["two_in_flight"],
                "allocator": real["allocator"] / peak if real["allocator"] else None,
                "ranks": ranks,
            }
        )
    return rows


def _line(row: dict) -> list[str]:
    actor = dict(row["actor"])
    layout = " ".join(f"{key} {value}" for key, value in actor.pop("parallel").items()) or "1 rank"
    options = ", ".join(f"{key} {value}" for key, value in actor.items()) or "-"
    return [
        row["model"],
        layout,
        options,
        f"{row['held'] / 1e6:.2f}",
        "yes" if row["equal"] else "NO",
        f"{row['real'] / 1e6:.2f}",
        f"{row['planned'] / row['real']:.3f}",
        f"{row['allocator']:.3f}" if row["allocator"] else "-",
    ]


if __name__ == "__main__":
    main()
