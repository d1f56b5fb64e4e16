"""A whole GRPO step of megagrpo beside one of AReaL 1.0.4, on a CPU, with the same engine.

    PYTHONPATH=. python bench/peers_step.py FOLDER [--steps 6]

FOLDER: of AReaL's environment, which the first call makes: its packages over those of this Python,
so both sides use one torch, one transformers and one SGLang. Both train the same tiny Qwen3-MoE in
float32 on one rank with one thread, and sample from one SGLang engine that is started as our service
starts it. Prompts, grader, objective and optimizer are the same. The sides take turns, step by step:
a warm-up step and `--steps` measured ones, of which the table has the least. CPU seconds are of all
processes of a side, the engine included. Wall seconds are in the JSON: beside other programs they
depend on how the machine shares its cores among sessions.

AReaL's warm-up trains on the batch of megagrpo's first step: that compares their results.
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import numpy as np
import psutil
from common import RESULTS, ROOT, provenance, write_results
from peers import environment, in_words

# All without what their metadata ask for: this Python has it in other releases, or it is for other
# engines, launchers, trackers and agents.
AREAL = (
    *("areal==1.0.4", "torchdata==0.11.0", "datasets==5.2.0", "multiprocess", "pandas", "pytz"),
    *(
        "six",
        "aiofiles",
        "omegaconf==2.4.0.dev2",
        "hydra-core==1.4.0.dev1",
        "nvidia-ml-py",
        "flask",
    ),
    *("tenacity", "tabulate", "colorlog", "blinker", "itsdangerous", "numba", "llvmlite", "pebble"),
    *("torch_memory_saver", "tensorboardX"),
)
PROMPTS, GROUP, PROMPT_TOKENS, LR, SEED = 8, 8, 32, 1e-4, 0
SIZES = {"hidden_size": 256, "num_layers": 6, "num_heads": 8, "expert_ffn_size": 256}
LETTERS = "".join(chr(0x4E00 + i) for i in range(4000))  # a token each
GRADER = """
def grade(text: str, answer: str) -> float:
    return sum(ord(letter) % 2 for letter in text) / max(len(text), 1)


def reward(prompt, completion, prompt_ids, completion_ids, /, **row):
    return grade(completion, "")
"""
# by the names that the loop gives them, the first in a step first; AReaL's carry the same
BEGINNING = "checkpoint"
PHASES = {
    "rollout": "sampling, rewards",
    "logprobs": "old log-probabilities",
    "what follows logprobs": "advantages",
    "update": "update",
    "publish": "weights to the engine",
}


class Clock:
    """Seconds of the phases of each step: wall, and CPU of this process and of all below it. A step
    begins when the other side has made its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.turn, self.side, self.count = args.round / "turn", args.side, args.steps + 1
        ctypes.CDLL(None).prctl(36, 1)  # processes whose parent ends (Ray's) come to this one
        self.steps: list[dict[str, list[float]]] = []
        self.phase, self.began = "", (0.0, 0.0)

    def enter(self, phase: str) -> None:
        """Ends the phase that runs, and begins another."""
        now = time.perf_counter(), self.cpu_seconds()
        if self.steps:  # not what comes before the first
            spent = self.steps[-1].setdefault(self.phase, [0.0, 0.0])
            self.steps[-1][self.phase] = [
                a + b - c for a, b, c in zip(spent, now, self.began, strict=True)
            ]
        if phase == BEGINNING:
            if self.steps:
                (other,) = SIDES.keys() - {self.side}
                self.turn.write_text(other)
            self.steps.append({})
            while len(self.steps) <= self.count and self.turn.read_text() != self.side:
                time.sleep(0.1)
            self.below = psutil.Process().children(recursive=True)
        self.phase, self.began = phase, (time.perf_counter(), self.cpu_seconds())

    def cpu_seconds(self) -> float:
        """Returns those of all processes that were there when the step began."""
        total = time.process_time()
        for process in self.below if self.steps else ():
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:2])
        return total


def experiment(folder: Path, args: argparse.Namespace) -> Path:
    """Makes model, prompts and grader in `folder`, and returns megagrpo's experiment."""
    from examples.laptop.model import make_tiny_model
    from examples.laptop.recipe import TinyModelConfig

    folder.mkdir(parents=True)
    size = make_tiny_model(
        TinyModelConfig(path=str(folder / "model"), alphabet=LETTERS, **SIZES), SEED
    )
    print(f"{size:,} parameters", flush=True)
    rng, count = np.random.default_rng(SEED), PROMPTS * (args.steps + 1)
    texts = ["".join(rng.choice(list(LETTERS), PROMPT_TOKENS)) for _ in range(count)]
    lines = [json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts]
    (folder / "data.jsonl").write_text("".join(lines))
    (folder / "grader.py").write_text(GRADER)
    train = {"num_prompts_per_step": PROMPTS, "group_size": GROUP, "num_steps": args.steps + 1}
    sections = {
        "name": "peers",
        "output_dir": str(folder / "run"),
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "data.jsonl"), "max_prompt_tokens": PROMPT_TOKENS},
        "sampling": {"max_response_tokens": args.tokens},
        "reward": {"grader": f"{folder}/grader.py:grade", "workers": 1},
        "train": train,
        # old log-probabilities are computed for a rejection, whose limit nothing reaches
        "algorithm": {
            "loss": {"name": "ppo_clip", "clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
            "mismatch": {"reject": {"high": 1e6}},
        },
        "actor": {"device": "cpu", "micro_batch_tokens": 4096, "optimizer": {"lr": LR}},
        "rollout": {"max_running_requests": PROMPTS * GROUP},
        "log": {"tensorboard": False, "dump_steps": [1]},
    }
    path = folder / "peers.yaml"
    path.write_text(json.dumps(sections))  # JSON is YAML
    return path


@contextmanager
def process(
    command: list[str], log: Path, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """Starts a program, and ends it with the block."""
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=env)
    try:
        yield child
    finally:
        child.terminate()
        child.wait()


def run_megagrpo(path: Path, args: argparse.Namespace) -> dict:
    """Runs the loop, with its service, as `megagrpo run` does; returns the seconds of its phases."""
    from megagrpo.config.load import load_config
    from megagrpo.loop.ranks import guarded, start_progress

    config, clock = load_config(path), Clock(args)

    def body(device) -> None:
        from megagrpo.loop.run import start_run
        from megagrpo.loop.train import train

        with start_progress("peers") as progress, start_run(config, None, device, progress) as run:
            enter = run.enter
            run.enter = lambda phase: (enter(phase), clock.enter(phase))
            train(run)

    log = path.with_name("service.log")
    words = [sys.executable, "-m", "megagrpo.cli", "serve", str(path)]
    with process(words, log, dict(os.environ)):
        assert guarded(config, "trainer", body) == 0
    entries = (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()
    return {"steps": clock.steps, "metrics": [json.loads(entry) for entry in entries]}


@contextmanager
def engine(path: Path) -> Iterator[str]:
    """Starts an engine as the service does, with the files of the model; yields its address."""
    from megagrpo.config.load import load_config
    from megagrpo.rollout.service.engine_command import (
        ServerPlace,
        engine_command,
        engine_environment,
        engine_python_path,
    )
    from megagrpo.rollout.service.node import free_port
    from megagrpo.system.environment import child_environment

    config = load_config(path, ["rollout.load_format=model"])
    port = free_port("127.0.0.1")
    place = ServerPlace(0, "127.0.0.1", port, "127.0.0.1:1", cuda=False, num_cores=os.cpu_count())
    env = child_environment(engine_environment(config, place), engine_python_path(place))
    with process(engine_command(config, place), path.with_name("engine.log"), env):
        yield f"127.0.0.1:{port}"


def trajectories(dump: Path) -> list[dict]:
    """Returns the groups of a step that megagrpo dumped, as AReaL has them."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    batch = torch.load(dump / "dp_0.pt", weights_only=True)
    names = ("tokens", "loss_mask", "rollout_logprobs", "old_logprobs", "advantages")
    values = [batch[name].split(batch["lengths"].tolist()) for name in names]
    found = []
    for group in batch["group_ids"].unique():
        of_group = (batch["group_ids"] == group).nonzero().flatten().tolist()
        tokens, mask, sampled, old, advantages = (
            pad_sequence([column[row] for row in of_group], batch_first=True) for column in values
        )
        lengths = batch["lengths"][of_group]
        found.append(
            {
                "input_ids": tokens.int(),
                "loss_mask": mask.int(),
                "logprobs": sampled,
                "versions": mask.int() - 1,
                "attention_mask": torch.arange(tokens.shape[1]) < lengths[:, None],
                "rewards": batch["rewards"]["values"][of_group].float(),
                "ours": (old, advantages),
            }
        )
    return found


def run_areal(path: Path, args: argparse.Namespace) -> dict:
    """Makes the same steps as AReaL's trainer (trainer/rl_trainer.py) makes them."""
    from megagrpo.rollout.service.node import free_port
    from megagrpo.system.torchvision import prepare_torchvision

    prepare_torchvision()
    for tracker in ("swanlab", "trackio"):  # imported, not used
        sys.modules[tracker] = module_from_spec(ModuleSpec(tracker, None))
    import torch
    from areal.api import FinetuneSpec, WeightUpdateMeta
    from areal.api.cli_args import (
        GenerationHyperparameters,
        InferenceEngineConfig,
        MicroBatchSpec,
        NameResolveConfig,
        NormConfig,
        OptimizerConfig,
        PPOActorConfig,
    )
    from areal.engine import FSDPPPOActor, RemoteSGLangEngine
    from areal.utils import name_resolve
    from areal.workflow.rlvr import RLVRWorkflow
    from torchdata.stateful_dataloader import StatefulDataLoader

    folder, clock = path.parent, Clock(args)
    sys.path.insert(0, str(folder))
    from grader import reward

    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    name_resolve.reconfigure(NameResolveConfig(nfs_record_root=str(folder / "names")))
    names = {"experiment_name": "peers", "trial_name": "areal"}
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    loader = StatefulDataLoader(rows, batch_size=PROMPTS, collate_fn=list)
    actor = FSDPPPOActor(
        PPOActorConfig(
            **names,
            path=str(folder / "model"),
            backend="fsdp:d1",
            attn_impl="sdpa",
            dtype="float32",
            mb_spec=MicroBatchSpec(max_tokens_per_mb=args.micro_batch),
            optimizer=OptimizerConfig(lr=LR, weight_decay=0.0),
            ppo_n_minibatches=1,
            eps_clip=0.2,
            eps_clip_higher=0.28,
            kl_ctl=0.0,
            recompute_logprob=True,
            reward_norm=NormConfig("group", False, "group", eps=1e-6, group_size=GROUP),
        )
    )
    actor.create_process_group()
    actor.initialize(None, FinetuneSpec(1, len(rows), PROMPTS))
    sampler = RemoteSGLangEngine(
        InferenceEngineConfig(**names, backend="sglang:d1", consumer_batch_size=PROMPTS)
    )
    sampling = GenerationHyperparameters(max_new_tokens=args.tokens)
    workflow = RLVRWorkflow(
        reward,
        sampling,
        actor.tokenizer,
        get_input_ids_fn=lambda text, tokenizer, thinking: tokenizer.encode(text),
        data_extract_prompt_fn=lambda row: row["prompt"],
    )
    metrics, compared = [], {}
    with engine(path) as address:
        sampler.initialize(addr=address, train_data_parallel_size=1)
        meta = WeightUpdateMeta.from_disk(**names, file_root=str(folder))
        actor.connect_engine(sampler, meta)
        for step in range(args.steps + 1):
            clock.enter(BEGINNING)
            clock.enter("rollout")
            sampler.resume()
            batch = actor.prepare_batch(loader, workflow, group_size=GROUP)
            clock.enter("what follows rollout")
            if step == 0:
                batch = trajectories(folder / "run" / "dumps" / "step_000001")
                ours = [group.pop("ours") for group in batch]
            clock.enter("logprobs")
            for group, values in zip(batch, actor.compute_logp(batch), strict=True):
                group["prox_logp"] = values
            clock.enter("what follows logprobs")
            batch = actor.compute_advantages(batch)
            clock.enter("update")
            actor.ppo_update(batch)
            actor.step_lr_scheduler()
            clock.enter("publish")
            sampler.pause()
            actor.update_weights(meta.with_version(step + 1))
            actor.set_version(step + 1)
            sampler.set_version(step + 1)  # paused, else it would sample in the other's step
            clock.enter("what follows publish")
            if step == 0:  # AReaL's values are those of the next token
                for name, mine in zip(
                    ("logprobs", "advantages"), zip(*ours, strict=True), strict=True
                ):
                    compared[name] = max(
                        float((group[name][:, :-1] - own[:, 1:]).mul(own[:, 1:] != 0).abs().max())
                        for group, own in zip(batch, mine, strict=True)
                    )
            metrics.append(actor.export_stats())
        clock.enter(BEGINNING)
        sampler.destroy()
    return {"steps": clock.steps, "metrics": metrics, "compared": compared}


def table(found: dict[str, dict]) -> list[list[str]]:
    """Returns the rows of the phases, of the whole step, and of the batch that both trained on."""
    # without the warm-up, and what follows the last
    sides = {side: one["steps"][1:-1] for side, one in found.items()}

    def row(name: str, phases: frozenset[str]) -> list[str]:
        ours, theirs = (
            min(sum(cpu for phase, (_, cpu) in step.items() if phase in phases) for step in steps)
            for steps in sides.values()
        )
        return [name, in_words(ours, 0.0), in_words(theirs, ours)]

    everything = frozenset(phase for steps in sides.values() for step in steps for phase in step)
    rows = [row(name, frozenset((phase,))) for phase, name in PHASES.items()]
    rows.append(row("the rest", everything - PHASES.keys()))
    rows.append(row("the step", everything))
    ours, theirs = found["megagrpo"]["metrics"], found["AReaL"]["metrics"]
    first = next(entry for entry in ours if "optim/grad_norm" in entry)
    for name, mine, its in (
        ("gradient norm, one batch", "optim/grad_norm", "grad_norm"),
        ("loss, one batch", "loss/total", "actor_loss/avg"),
    ):
        value = theirs[0][f"ppo_actor/update/{its}"]
        rows.append([name, f"{first[mine]:.6f}", f"{value:.6f}"])
    for name, value in found["AReaL"]["compared"].items():
        rows.append([f"{name}, one batch", "", f"differ by {value:.1g}"])
    return rows


def measure(args: argparse.Namespace) -> None:
    """Runs both sides in turns, and writes the table."""
    folder = args.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    experiment(folder, args)
    (folder / "turn").write_text("megagrpo")
    with ExitStack() as stack:
        sides = []
        for side in SIDES:
            words = [*sys.argv[1:], "--side", side, "--round", str(folder)]
            command = [sys.executable, "-W", "ignore", __file__, *words]
            sides.append(stack.enter_context(process(command, folder / f"{side}.log")))
        while any(side.poll() is None for side in sides):
            if any(side.poll() for side in sides):
                raise RuntimeError(f"a side failed, see {folder}/*.log")
            time.sleep(1)
    found = {side: json.loads((folder / f"{side}.json").read_text()) for side in SIDES}
    header = ("phase", "megagrpo, CPU s", "AReaL, CPU s")
    data = provenance() | {"options": {"tokens": args.tokens}, "sides": found}
    write_results("peers_step_areal", data, header, table(found), args.results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of AReaL's environment, and of the runs")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="most of a response")
    parser.add_argument(
        "--micro-batch", type=int, default=1024, help="tokens, of AReaL: its best of 256, 512, 1024"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--side", choices=("environment", *SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--round", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    os.environ |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")} | {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # AReaL would compile its log-probabilities, by C++
        "PYTHONPATH": str(ROOT),
    }
    if args.side is None:
        python = environment(args.folder, AREAL, ())
        command = [python, "-W", "ignore", __file__, *sys.argv[1:], "--side", "environment"]
        sys.exit(subprocess.run(command).returncode)
    if args.side == "environment":
        measure(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the engine, too
    found = SIDES[args.side](args.round / "peers.yaml", args)
    (args.round / f"{args.side}.json").write_text(json.dumps(found))


SIDES = {"megagrpo": run_megagrpo, "AReaL": run_areal}

if __name__ == "__main__":
    main()
