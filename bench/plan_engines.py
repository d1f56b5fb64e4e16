"""What engines in FP8, smaller ones, and attention by data parallelism would change in a step, by
`megagrpo plan`.

    python bench/plan_engines.py

The shipped experiments of 235B to 1T parameters on their own nodes, from the models' config.json:
closed forms, nothing runs. Writes bench/results/plan_engines.{json,md}.
"""

from common import ROOT, provenance, write_results

from megagrpo.check.rules import engine_layout
from megagrpo.check.rules.subject import Subject, broken
from megagrpo.config.load import load_config
from megagrpo.models.folder import Model
from megagrpo.tools.plan.fitting import with_model
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
    whole = ["rollout.sglang={enable_dp_attention: true, dp_size: 8, moe_dense_tp_size: 1}"]
    return {
        "as shipped": [],
        "attention dp 8": attention,
        "FP8": fp8,
        "FP8, attention dp 8": fp8 + attention,
        "FP8, twice as many of half the ranks": fp8 + smaller,
        "FP8, twice as many of half the ranks, attention dp 8": fp8 + smaller + attention,
        "the same, dense layers whole": fp8 + smaller + whole,
    }


def main() -> None:
    lines = []
    for name in NAMES:
        shipped = 0.0
        for label, overrides in variants(name).items():
            config = with_model(load_config(ROOT / "configs" / f"{name}.yaml", overrides))
            rollout = config.rollout
            engines = f"{rollout.num_engines} x tp {rollout.tp}, {label}"
            arch = Model.of(config).arch
            if broken(engine_layout.before_start(Subject(config, arch=arch))):
                lines.append([name, engines, "", "", "", "SGLang cannot cut it", ""])
                continue
            plan = plan_step(config, target_of(config))
            engine = plan.engine
            shipped = shipped or plan.step
            seconds = f"{plan.step:.0f}"
            line = [name, engines, f"{engine.resident / 1e9:.1f}", str(engine.concurrent)]
            line += [f"{plan.seconds['rollout']:.0f}"]
            line += ["does not fit" if plan.problems else seconds, f"{plan.step / shipped:.2f}"]
            lines.append(line)
    write_results("plan_engines", {**provenance(), "lines": lines}, HEADER, lines)


if __name__ == "__main__":
    main()
