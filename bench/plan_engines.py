"""What engines in FP8, smaller ones, and attention by data parallelism would change in a step, by
`megagrpo plan`.

    python bench/plan_engines.py

The shipped experiments of 235B to 1T parameters on their own nodes, from the models' config.json:
closed forms, nothing runs. Writes bench/results/plan_engines.{json,md}.
"""

from common import ROOT, provenance, write_results

from megagrpo.check.fitting import with_model
from megagrpo.config.load import load_config
from megagrpo.tools.plan.roofline import plan_step, target_of

NAMES = ("qwen3_235b_a22b", "glm45_355b", "deepseek_v3_671b", "kimi_k2_1t")
HEADER = (
    "experiment", "engines", "weights GB a rank", "samples at once", "rollout s", "step s", "of the shipped step",
)  # fmt: skip


def variants(name: str) -> dict[str, list[str]]:
    """Overrides of each row by what the row says."""
    rollout = load_config(ROOT / "configs" / f"{name}.yaml").rollout
    fp8 = ["rollout.quantization=fp8"]
    smaller = [
        f"rollout.num_engines={2 * rollout.num_engines}",
        f"rollout.tp={rollout.tp // 2}",
        f"rollout.ep={rollout.ep // 2}",
        f"rollout.nodes_per_engine={max(rollout.nodes_per_engine // 2, 1)}",
    ]
    attention = ["rollout.sglang={enable_dp_attention: true, dp_size: 8}"]
    return {
        "as shipped": [],
        "attention dp 8": attention,
        "FP8": fp8,
        "FP8, attention dp 8": fp8 + attention,
        "FP8, twice as many of half the ranks": fp8 + smaller,
        "FP8, twice as many of half the ranks, attention dp 8": fp8 + smaller + attention,
    }


def main() -> None:
    rows = []
    for name in NAMES:
        shipped = 0.0
        for label, overrides in variants(name).items():
            config = with_model(load_config(ROOT / "configs" / f"{name}.yaml", overrides))
            plan = plan_step(config, target_of(config))
            rollout, engine = config.rollout, plan.engine
            shipped = shipped or plan.step
            rows.append(
                {
                    "name": name,
                    "engines": f"{rollout.num_engines} x tp {rollout.tp}, {label}",
                    "weights_gb": engine.weights / 1e9,
                    "concurrent": engine.concurrent,
                    "rollout_s": plan.seconds["rollout"],
                    "step_s": plan.step,
                    "share": plan.step / shipped,
                    "problems": plan.problems,
                }
            )
    lines = [
        (
            row["name"],
            row["engines"],
            f"{row['weights_gb']:.1f}",
            str(row["concurrent"]),
            f"{row['rollout_s']:.0f}",
            "does not fit" if row["problems"] else f"{row['step_s']:.0f}",
            f"{row['share']:.2f}",
        )
        for row in rows
    ]
    write_results("plan_engines", {**provenance(), "rows": rows}, HEADER, lines)


if __name__ == "__main__":
    main()
