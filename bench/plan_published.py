"""Is the roofline of `megagrpo plan` below every step that others have published, and do their
layouts fit?

    python bench/plan_published.py

Plans each published run on its own GPUs with its own layout, batch and lengths, and compares the
bound with published seconds. Writes bench/results/plan_published.{json,md}; ends with status 1 if a
published step or publish is faster than the bound.
"""

import math
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from common import RESULTS, provenance, write_results

from megagrpo.config.load import load_config
from megagrpo.tools.plan.engine_memory import Lengths
from megagrpo.tools.plan.hardware import usable_bytes
from megagrpo.tools.plan.roofline import Plan, plan_step, target_of, train_seconds
from megagrpo.tools.plan.trainer_memory import Load, trainer_side

ROOT = Path(__file__).resolve().parent.parent
NEMO = "NeMo-RL docs/about/performance-summary.md, v0.6, DGX-H100, bf16"
VERL = "verl examples/grpo_trainer/"
MILES = "miles docs/en/advanced/p2p-weight-transfer.md, H100, RDMA between ranks"
HEADER = (
    "run", "GPUs", "trainers", "engines", "trainer GB of", "engine cache tokens", "step s: published", "bound",
    "ratio", "publish s: published", "bound", "ratio", "source",
)  # fmt: skip
TRAINED = (
    "pretraining",
    "GPUs",
    "trainers",
    "update s: published",
    "bound",
    "ratio",
    "different there",
    "source",
)
RULE = ("---",) * len(TRAINED)


@dataclass(frozen=True)
class Run:
    """One published run. `off_host`: parts of a trainer's memory that it keeps on the host, which
    we do not do."""

    name: str
    model: str
    source: str
    hardware: str
    trainers: tuple[int, str]  # ranks, layout
    engines: tuple[int, int]  # number, ranks of each
    prompts: int
    group: int
    longest: int  # tokens of prompt and response
    mean: int | None = None  # of prompt and response; None: not published
    updates: int = 1
    micro_batch_tokens: int | None = None  # default: one sample of the longest kind
    recompute: str = "full"
    attention_dp: int = 1
    memory_fraction: float = 0.85
    off_host: tuple[str, ...] = ()
    shared: bool = True  # both sides on the same GPUs
    off_policy: bool = False
    step_s: float | None = None
    publish_s: float | None = None
    extra: tuple[str, ...] = field(default=())


_HOST = ("optimizer",)
RUNS = (
    Run("NeMo-RL Qwen3-30B-A3B", "Qwen3-30B-A3B", NEMO, "H100", (32, "tp=2 ep=8"), (8, 4), 64, 32, 4096, 3203,
        updates=4, recompute="none", memory_fraction=0.6, step_s=192),
    Run("NeMo-RL Qwen3-30B-A3B, one step off", "Qwen3-30B-A3B", NEMO, "H100", (16, "ep=8 pp=2"), (8, 2), 64, 32, 4096,
        3203, updates=4, recompute="none", shared=False, off_policy=True, step_s=152),
    Run("NeMo-RL Qwen3-235B-A22B", "Qwen3-235B-A22B", NEMO, "H100",
        (128, "tp=2 cp=2 ep=16 pp=8 first_stage_layers=11 last_stage_layers=11"), (8, 16), 16, 32, 8192, 5698,
        memory_fraction=0.6, step_s=395),
    Run("NeMo-RL Qwen3-235B-A22B, one step off", "Qwen3-235B-A22B", NEMO, "H100",
        (128, "tp=4 ep=16 pp=8 first_stage_layers=11 last_stage_layers=11"), (16, 8), 16, 32, 8192, 5698,
        shared=False, off_policy=True, memory_fraction=0.8, step_s=231),
    Run("NeMo-RL DeepSeek-V3", "DeepSeek-V3-0324", NEMO, "H100",
        (256, "ep=16 pp=16 first_stage_layers=3 last_stage_layers=2"), (8, 32), 32, 16, 1536, 701,
        memory_fraction=0.6, step_s=134),
    Run("NeMo-RL DeepSeek-V3, one step off", "DeepSeek-V3-0324", NEMO, "H100",
        (256, "ep=16 pp=16 first_stage_layers=3 last_stage_layers=2"), (8, 32), 32, 16, 1536, 701,
        shared=False, off_policy=True, memory_fraction=0.8, step_s=64.1),
    Run("slime Qwen3-30B-A3B", "Qwen3-30B-A3B", "slime scripts/run-qwen3-30B-A3B.sh", "H100", (8, "tp=4 ep=8"), (1, 8),
        8, 4, 10240, micro_batch_tokens=20480, memory_fraction=0.7, off_host=_HOST),
    Run("slime Qwen3-235B-A22B", "Qwen3-235B-A22B", "slime scripts/run-qwen3-235B-A22B.sh", "H100",
        (64, "tp=4 pp=4 cp=2 ep=16 last_stage_layers=22"), (2, 32), 8, 8, 10240, micro_batch_tokens=32768,
        attention_dp=4, memory_fraction=0.7, off_host=_HOST, shared=False),
    Run("slime GLM-4.5-355B", "GLM-4.5", "slime scripts/run-glm4.5-355B-A32B.sh", "H100",
        (64, "tp=8 pp=4 cp=2 ep=16"), (2, 32), 128, 8, 34816, updates=4, micro_batch_tokens=32768, attention_dp=4,
        memory_fraction=0.7, off_host=_HOST),
    Run("slime DeepSeek-R1 671B", "DeepSeek-V3-0324", "slime scripts/run-deepseek-r1.sh", "H100",
        (128, "tp=8 pp=4 cp=4 ep=32 last_stage_layers=13"), (2, 64), 128, 8, 34816, updates=4,
        micro_batch_tokens=65536, attention_dp=8, memory_fraction=0.7, off_host=_HOST),
    Run("verl Qwen3-30B-A3B", "Qwen3-30B-A3B", VERL + "run_qwen3moe-30b_megatron_96gb.sh", "H20",
        (8, "ep=8"), (2, 4), 512, 16, 10240, updates=4, memory_fraction=0.7, off_host=_HOST),
    Run("verl Qwen3-235B-A22B", "Qwen3-235B-A22B", VERL + "run_qwen3-235b_megatron_96gb.sh", "H20",
        (32, "tp=4 pp=8 ep=4 first_stage_layers=11 last_stage_layers=11"), (4, 8), 32, 8, 11680, updates=2,
        memory_fraction=0.85, off_host=_HOST),
    Run("verl DeepSeek-V3 671B", "DeepSeek-V3-0324", VERL + "run_deepseek671b_math_megatron_96gb.sh", "H20",
        (96, "tp=8 pp=12 ep=8 last_stage_layers=6"), (3, 32), 96, 8, 11680, updates=3, memory_fraction=0.6,
        off_host=_HOST),
    Run("miles publish, Qwen3-30B-A3B", "Qwen3-30B-A3B", MILES, "H100", (16, "tp=4 ep=8"), (2, 8), 8, 8, 8192,
        shared=False, publish_s=2.160),
    Run("miles publish, Qwen3-235B-A22B", "Qwen3-235B-A22B", MILES, "H100",
        (64, "tp=4 pp=4 cp=2 ep=16 last_stage_layers=22"), (2, 32), 8, 8, 8192, shared=False, publish_s=3.162,
        off_host=_HOST),
    Run("miles publish by broadcast, Qwen3-235B-A22B", "Qwen3-235B-A22B",
        MILES.replace("RDMA between ranks", "NCCL broadcast from each pipeline stage"), "H100",
        (64, "tp=4 pp=4 cp=2 ep=16 last_stage_layers=22"), (2, 32), 8, 8, 8192, shared=False, publish_s=10.754,
        off_host=_HOST, extra=("weights.transport=broadcast",)),
)  # fmt: skip
NOT_PUBLISHED = "not published"
AUTOMODEL = (
    "NeMo AutoModel docs/performance-summary.md, April 2026, H100, bf16, balanced experts, DeepEP"
)
# model, ranks, layout, samples of an update, samples of a micro-batch, seconds of an update, what
# is different there
PRETRAINED = (
    ("Qwen3-30B-A3B", 8, "ep=8", 512, 4, 21.77, "-"),
    ("DeepSeek-V3-0324", 256, "pp=4 ep=64 first_stage_layers=15 last_stage_layers=14", 512, 1, 8.18,
     "8 virtual stages"),
    ("DeepSeek-V3-0324", 1024, "pp=4 ep=64 first_stage_layers=15 last_stage_layers=14", 8192, 1, 37.87,
     "8 virtual stages"),
    ("Kimi-K2-Instruct", 256, "pp=8 ep=32 first_stage_layers=6 last_stage_layers=7", 512, 2, 8.86, "4 virtual stages"),
)  # fmt: skip


def main() -> None:
    found = [_plan(run) for run in RUNS]
    lines = [_line(run, plan) for run, plan in zip(RUNS, found, strict=True)]
    data = provenance() | {"load": os.getloadavg()[1]}
    data["runs"] = [_record(run, plan) for run, plan in zip(RUNS, found, strict=True)]
    write_results("plan_published", data, HEADER, lines)
    trained = [_pretrained(*row) for row in PRETRAINED]
    with (RESULTS / "plan_published.md").open("a") as file:
        file.write(
            "\n".join(
                [
                    "",
                    NOTES,
                    *(f"| {' | '.join(cells)} |" for cells in (TRAINED, RULE, *trained)),
                    "",
                ]
            )
        )
    faster = [
        run.name
        for run, plan in zip(RUNS, found, strict=True)
        if (run.step_s or math.inf) < _step(run, plan)
        or (run.publish_s or math.inf) < plan.seconds["publish"]
    ]
    if faster:
        sys.exit(f"published faster than the bound: {faster}")


def _plan(run: Run) -> Plan:
    prompt = min(2048, run.longest // 8)
    ranks, layout = run.trainers
    engines, tp = run.engines
    words = [
        f"model.path={ROOT / 'configs/models' / run.model}",
        f"data.max_prompt_tokens={prompt}",
        f"sampling.max_response_tokens={run.longest - prompt}",
        "eval=null",
        "algorithm.reward.overlong=null",
        f"train.num_prompts_per_step={run.prompts}",
        f"train.group_size={run.group}",
        f"train.num_updates_per_step={run.updates}",
        f"actor.world_size={ranks}",
        "actor.parallel={tp: 1}",
        *(f"actor.parallel.{word}" for word in layout.split()),
        "actor.transformer_engine=true",
        f"actor.micro_batch_tokens={run.micro_batch_tokens or run.longest}",
        f"actor.recompute={run.recompute}",
        f"rollout.num_engines={engines}",
        "rollout.min_healthy_engines=1",
        f"rollout.tp={tp}",
        "rollout.ep=1",
        f"rollout.nodes_per_engine={max(1, tp // 8)}",
        "rollout.max_running_requests=1024",
        f"rollout.mem_fraction={run.memory_fraction}",
        "weights.transport=reshard",
        "checkpoint.every=0",
        *run.extra,
    ]
    if run.attention_dp > 1:
        words.append(f"rollout.sglang={{enable_dp_attention: true, dp_size: {run.attention_dp}}}")
    if "NeMo" in run.source:  # their loss has a KL term and corrects for the engines' probabilities
        words += ["algorithm.kl={loss_coef: 0.01}", "algorithm.mismatch={weight: {name: tis}}"]
    config = load_config(ROOT / "configs/qwen3_235b_a22b.yaml", words)
    lengths = None if run.mean is None else str(run.mean - prompt // 4)
    target = target_of(config, run.hardware, lengths=lengths)
    return plan_step(config, target)


def _pretrained(
    model: str, ranks: int, layout: str, samples: int, rows: int, published: float, other: str
) -> list[str]:
    """The row of a published pretraining step: every sample has 4,096 tokens, experts are equally
    full."""
    words = [
        f"model.path={ROOT / 'configs/models' / model}", "eval=null", "algorithm.reward.overlong=null",
        "data.max_prompt_tokens=1", "sampling.max_response_tokens=4095", "train.group_size=2",
        f"train.num_prompts_per_step={samples // 2}", "train.num_updates_per_step=1", f"actor.world_size={ranks}",
        "actor.parallel={tp: 1}", *(f"actor.parallel.{word}" for word in layout.split()),
        "actor.transformer_engine=true", f"actor.micro_batch_tokens={4096 * rows}", "actor.recompute=none",
    ]  # fmt: skip
    config = load_config(ROOT / "configs/qwen3_235b_a22b.yaml", words)
    target = replace(target_of(config), lengths=Lengths(0.0, np.full(2, 4096.0), "given"))
    side = trainer_side(target.arch, config.actor, Load(4096 * rows))
    compared = _compared(published, sum(train_seconds(config, target, side.stages)[1].values()))
    return [
        model,
        str(ranks),
        layout.replace("=", " ").replace("_stage_layers", ""),
        *compared,
        other,
        AUTOMODEL,
    ]


def _trainer_bytes(run: Run, plan: Plan) -> float:
    """Bytes of the fullest rank without what the published run keeps on the host."""
    ranks = [rank.parts for rank in plan.trainers.phases.values()]
    return max(
        sum(size for name, size in parts.items() if name not in run.off_host) for parts in ranks
    )


def _step(run: Run, plan: Plan) -> float:
    return plan.off_policy if run.off_policy else plan.synchronous


def _line(run: Run, plan: Plan) -> list[str]:
    engines, tp = run.engines
    ranks, layout = run.trainers
    room, used = usable_bytes(plan.target.hardware), _trainer_bytes(run, plan)
    host = " (optimizer on the host)" if run.off_host else ""
    fits = "" if used <= room else " DOES NOT FIT"
    gpus = (
        f"{ranks} {run.hardware}, shared"
        if run.shared
        else f"{ranks} + {engines * tp} {run.hardware}"
    )
    cache = (
        f"{plan.engine.cache_tokens:,}"
        if not plan.engine.problems
        else f"DOES NOT FIT: {plan.engine.problems[0]}"
    )
    short = layout.replace("=", " ").replace("_stage_layers", "")
    attention = f", attention dp {run.attention_dp}" if run.attention_dp > 1 else ""
    return [
        run.name, gpus, short, f"{engines} x tp {tp}{attention}",
        f"{used / 1e9:.1f} of {room / 1e9:.1f}{host}{fits}", cache,
        *_compared(run.step_s, _step(run, plan)), *_compared(run.publish_s, plan.seconds["publish"]), run.source,
    ]  # fmt: skip


def _compared(published: float | None, predicted: float) -> list[str]:
    if published is None:
        return [NOT_PUBLISHED, f"{predicted:.3g}", ""]
    return [f"{published:g}", f"{predicted:.3g}", f"{predicted / published:.2f}"]


def _record(run: Run, plan: Plan) -> dict:
    return {
        "name": run.name,
        "source": run.source,
        "trainer_bytes": _trainer_bytes(run, plan),
        "usable_bytes": usable_bytes(plan.target.hardware),
        "engine_problems": list(plan.engine.problems),
        "seconds": dict(plan.seconds),
        "parts": {phase: dict(parts) for phase, parts in plan.parts.items()},
        "bound": _step(run, plan),
        "published_step": run.step_s,
        "publish": plan.seconds["publish"],
        "published_publish": run.publish_s,
    }


NOTES = """Ratio: bound over published. Other systems: vLLM in NeMo-RL; weights swapped on shared GPUs and gathered
before they are sent. Trainer memory is what this program needs, with float32 gradients; NeMo-RL's are bf16. Lengths
that were not published: assumed, see docs/planning.md. Recomputation that a script does not state: full.

Training only, without recomputation. The bound is of this program's schedule and all-to-all, planned without virtual
stages; theirs have some, and DeepEP, which sends a token once to each node and overlaps: hence ratios above 1.
"""

if __name__ == "__main__":
    main()
