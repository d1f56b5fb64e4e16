"""Tokens a second of an update with a long tail of lengths: dynamic context parallelism beside fixed sizes.

PYTHONPATH=. python bench/dynamic_cp.py   # two gloo ranks on a CPU, some minutes; sides alternate
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import ROOT, provenance, write_results

from megagrpo.actor.host import prepare_host

DEVICE = prepare_host("cpu")
from examples.laptop.recipe import TinyModelConfig  # noqa: E402
from megagrpo.actor.schedule import micro_batches  # noqa: E402
from megagrpo.config.schema import ActorConfig  # noqa: E402
from megagrpo.tools.certify.measure import OPTIMIZER, joined  # noqa: E402
from megagrpo.tools.certify.tiny_model import hf_config  # noqa: E402
from megagrpo.tools.ranks.warm_up import likelihood_step  # noqa: E402
from megagrpo.types import Batch, Rewards  # noqa: E402

LONGEST, SAMPLES, ROUNDS = 4096, 48, 3
SIDES = {
    "fixed, cp 1": {"cp": 1},
    "fixed, cp 2": {"cp": 2},
    "dynamic, cp 2": {"cp": 2, "dynamic_context": True},
}
SIZES = {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}


def lengths_of_step() -> list[int]:
    """A log-normal tail, the longest sample once."""
    chance = random.Random(0)
    drawn = [int(chance.lognormvariate(5.5, 0.9)) for _ in range(SAMPLES - 1)]
    return sorted([LONGEST, *(max(16, min(n, LONGEST)) for n in drawn)], reverse=True)


def batch_of(lengths: list[int]) -> Batch:
    """Samples that are trained on except for their first token."""
    sizes = torch.tensor(lengths)
    tokens, samples = int(sizes.sum()), len(lengths)
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[sizes.cumsum(0) - sizes] = False
    none = torch.zeros(samples)
    return Batch(
        sample_ids=torch.arange(samples),
        group_ids=torch.arange(samples),
        num_groups=samples,
        tokens=torch.randint(3, 32, (tokens,), dtype=torch.int32),
        lengths=sizes,
        prompt_lengths=torch.ones_like(sizes),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(tokens),
        rewards=Rewards(none, none == 0),
        truncated=none != 0,
    )


def ranks(folder: Path) -> None:
    """Measures every side on this rank, one after the other, ROUNDS times."""
    found: dict[str, list[dict]] = {name: [] for name in SIDES}
    lengths = lengths_of_step()
    for number in range(ROUNDS):
        for side, parallel in SIDES.items():
            config = ActorConfig(world_size=2, parallel=parallel, micro_batch_tokens=LONGEST)
            store = folder / f"store {number} {side}"
            options = {"config": config, "optimizer": OPTIMIZER, "device": DEVICE}
            with joined(store, model_path=str(folder), **options) as actor:
                for parameter in actor.parameters().values():
                    torch.nn.init.normal_(parameter, std=0.02)
                actor.weights_loaded()
                mesh = actor.mesh
                batch = batch_of(lengths[mesh.dp_rank :: mesh.dp_size])
                few = batch_of([64])
                likelihood_step(actor, few)  # warm
                micros = micro_batches(actor, batch, range(len(batch.lengths)))
                start = time.perf_counter()
                likelihood_step(actor, batch)
                seconds = time.perf_counter() - start
                most = mesh.gather_world(max(height * width for height, width in micros.shapes))
                contexts = [micro.context for micro in micros]
            found[side].append({"seconds": seconds, "most": max(most), "contexts": contexts})
    if mesh.is_main:
        (folder / "found.json").write_text(json.dumps(found))


def main() -> None:
    if sys.argv[1:]:
        ranks(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = hf_config(TinyModelConfig(path=name, family="qwen3", ffn_size=256, **SIZES))
        (folder / "config.json").write_text(json.dumps(model))
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        subprocess.run([*torchrun, __file__, name], cwd=ROOT, check=True)
        found = json.loads((folder / "found.json").read_text())
    tokens, lines = sum(lengths_of_step()), []
    for side, measured in found.items():
        rates = sorted(tokens / one["seconds"] for one in measured)
        contexts = measured[0]["contexts"]
        shared = ", ".join(f"{contexts.count(n)} of {n}" for n in sorted(set(contexts)))
        figures = f"{statistics.median(rates):,.0f} ({rates[0]:,.0f} to {rates[-1]:,.0f})", shared
        lines.append((side, *figures, f"{measured[0]['most']:,}"))
    header = (
        "side",
        "tokens a second",
        "micro-batches of so many ranks",
        "tokens of a rank at most",
    )
    write_results("dynamic_cp", provenance() | {"tokens": tokens, "sides": found}, header, lines)


if __name__ == "__main__":
    main()
