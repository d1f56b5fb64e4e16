"""How far is the trainer from an engine whose routers choose other experts, with and without
routing replay?

    python bench/routing_replay.py [--families F ...] [--model FOLDER] [--noise 0 0.01 0.03 0.1]
    [--tokens 48]

An engine serves the model with noise in its routers' weights alone, of so much of their standard
deviation, as another precision or older weights would put it there. It samples; the trainer, with
the model as it is, gives the same tokens their log-probabilities, once with experts of its own
choice and once with the engine's (R3). The models are random ones of these families, with experts
that differ, or that of --model. Adds to what an earlier call for other families has written to
bench/results/routing_replay.{json,md}; ends with status 1 where replay does not lower the KL of an
engine that chose other experts, or changes a bit of one that chose the same.
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from common import RESULTS, provenance, write_results

sys.path.pop(0)  # this folder, whose statistics.py torch would take for Python's own
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "e2e"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.dist.workers.host import DEVICE  # comes first: it prepares the host for Megatron

# isort: split

import httpx
import numpy as np
import torch
from engine_process import OneEngine

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.actor.megatron_actor import MegatronActor, leave_distributed
from megagrpo.actor.step import token_logprobs
from megagrpo.batching.batch import build_batch
from megagrpo.batching.updates import one_pass
from megagrpo.config.schema import ActorConfig, ExperimentConfig, OptimizerConfig
from megagrpo.models.folder import Model
from megagrpo.rollout.answer_arrays import read_experts
from megagrpo.rollout.control import bearer
from megagrpo.types import Batch, Outcome, Prompt, RolloutGroup, Sample
from megagrpo.weights.actor_weights import load_initial_weights
from megagrpo.weights.hf_folder import HfFolder, write_hf_folder

NUM_PROMPTS, PROMPT_TOKENS = 48, 6
NAME = "routing_replay"
# softmax routers; sigmoid routers with biases, and all but kimi_k2's in groups
FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3", "kimi_k2")
HEADER = ("model", "noise", "differ", "KL, own experts", "KL, replayed", "mean abs, own", "mean abs, replayed",
          "largest, own", "largest, replayed")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="F")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.01, 0.03, 0.1])
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    file = RESULTS / f"{NAME}.json"
    runs = {_key(run): run for run in json.loads(file.read_text())["runs"]} if file.exists() else {}
    bad = []
    for name in [args.model.name] if args.model else args.families:
        with tempfile.TemporaryDirectory() as folder:
            model = args.model or _random_model(Path(folder) / "model", name)
            new = _runs_of(name, model, Path(folder), args.noise, args.tokens)
        bad += [run for run in new if not _good(run)]
        runs |= {_key(run): run for run in new}
        ordered = [runs[key] for key in sorted(runs)]
        write_results(
            NAME, provenance() | {"runs": ordered}, HEADER, [_line(run) for run in ordered]
        )
    if bad:
        sys.exit(f"not as wanted: {bad}")


def _key(run: dict) -> tuple[str, float]:
    return run["model"], run["noise"]


def _runs_of(
    name: str, model: Path, folder: Path, noises: list[float], num_tokens: int
) -> list[dict]:
    engine, actor, runs = _engine(model, folder), _trainer(model), []
    try:
        engine.start()
        for number, noise in enumerate(noises):
            found = _run(actor, model, engine, folder / str(number), noise, num_tokens)
            runs.append({"model": name, "tokens": NUM_PROMPTS * num_tokens, **found})
            print(*_line(runs[-1]), flush=True)
    finally:
        engine.stop()
        leave_distributed(actor)
    return runs


def _random_model(folder: Path, family: str) -> Path:
    make_tiny_model(
        TinyModelConfig(path=str(folder), family=family, num_experts=16, experts_per_token=2),
        seed=0,
    )
    # a random model's experts are all alike to its logits: here they differ
    return _changed(
        folder, folder.with_name("distinct"), lambda name, t: 4.0 * t if ".experts." in name else t
    )


def _changed(source: Path, target: Path, change) -> Path:
    """Writes the model with other tensors: change(name, tensor)."""
    hf = HfFolder(source)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    write_hf_folder(
        target.with_suffix(".new"), iter([{n: change(n, hf[n]) for n in hf}]), source, torch.float32
    )
    for part in target.with_suffix(".new").glob("*.safetensors*"):
        shutil.move(part, target / part.name)
    return target


def _trainer(model: Path) -> MegatronActor:
    actor = MegatronActor(
        arch=Model.read(model).arch,
        config=ActorConfig(routing_replay="rollout", optimizer=OptimizerConfig(distributed=False)),
        num_updates=1,
        seed=0,
        device=DEVICE,
    )
    load_initial_weights(actor, str(model))
    return actor


def _run(
    actor: MegatronActor,
    model: Path,
    engine: OneEngine,
    folder: Path,
    noise: float,
    num_tokens: int,
) -> dict:
    generator = torch.Generator().manual_seed(1)

    def noisy(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight")):
            return tensor
        return tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)

    folder.mkdir()
    _asked(
        engine,
        "/update_weights_from_disk",
        {"model_path": str(_changed(model, folder / "engine", noisy))},
    )
    batch = _sampled(actor, model, engine, num_tokens)
    replayed, differ = _compared(actor, batch)
    own, _ = _compared(actor, replace(batch, routing=None))
    return {"noise": noise, "differ": differ, "own": own, "replayed": replayed}


def _asked(engine: OneEngine, path: str, body: dict) -> list | dict:
    answer = httpx.post(
        f"{engine.info.url}{path}", json=body, headers=bearer(OneEngine.api_key), timeout=300
    )
    return answer.raise_for_status().json()


def _engine(model: Path, folder: Path) -> OneEngine:
    sections = {
        "model": {"path": str(model)},
        "rollout": {"load_format": "model"},
        "data": {"path": "unused"},
    }
    sections |= {"name": "bench", "output_dir": str(folder), "actor": {"routing_replay": "rollout"}}
    return OneEngine(ExperimentConfig.model_validate(sections), folder)


def _sampled(actor: MegatronActor, model: Path, engine: OneEngine, num_tokens: int) -> Batch:
    """Returns what the engine samples now, with its log-probabilities and experts."""
    arch, generator = Model.read(model).arch, torch.Generator().manual_seed(2)
    prompts = torch.randint(
        3, arch.vocab_size, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator
    ).tolist()
    sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
    body = {
        "input_ids": prompts,
        "sampling_params": sampling,
        "return_logprob": True,
        "return_routed_experts": True,
    }
    groups = []
    for number, (prompt, out) in enumerate(
        zip(prompts, _asked(engine, "/generate", body), strict=True)
    ):
        logprobs, tokens, *_ = zip(*out["meta_info"]["output_token_logprobs"], strict=True)
        num_read = len(prompt) + len(tokens) - 1
        quoted = json.dumps(out["meta_info"]["routed_experts"]).encode()
        experts = read_experts(arch, quoted, num_read)
        sample = Sample(
            0, np.array(tokens), np.array(logprobs), "length", 0, "", routed_experts=experts
        )
        groups.append(
            RolloutGroup(
                number, Prompt(number, "", np.array(prompt), ""), (sample,), (Outcome("score"),)
            )
        )
    assert actor.routing is not None
    return build_batch(
        groups, one_pass(len(groups)), actor.mesh, routed_layers=actor.routing.layers
    )


def _compared(actor: MegatronActor, batch: Batch) -> tuple[dict[str, float], float | None]:
    """Returns figures of log-probabilities, engine's and trainer's, and the share of (token, layer)
    that differs."""
    assert actor.routing is not None
    ratio = (token_logprobs(actor, batch, 1.0) - batch.rollout_logprobs).double()[batch.loss_mask]
    figures = {
        "kl": ratio.exp() - 1 - ratio,
        "mean": ratio.abs(),
    }  # k3: of the engine from the trainer
    found = {name: float(values.mean()) for name, values in figures.items()}
    return found | {"largest": float(ratio.abs().max())}, actor.routing.take().get(
        "router/replay_differs"
    )


def _line(run: dict) -> tuple[str, ...]:
    pairs = [
        f"{run[which][name]:.1e}"
        for name in ("kl", "mean", "largest")
        for which in ("own", "replayed")
    ]
    return run["model"], f"{run['noise']:g}", f"{run['differ']:.5f}", *pairs


def _good(run: dict) -> bool:
    if run["differ"] == 0:
        return run["own"] == run["replayed"]
    return run["replayed"]["kl"] < run["own"]["kl"]


if __name__ == "__main__":
    main()
