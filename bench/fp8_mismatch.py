"""What FP8 engines round: log-probabilities by kind of weights, and by a whole engine; greedy
answers that stay.

    python bench/fp8_mismatch.py MODEL DATA    a model of configs/quickstart_fp8.yaml after its
    warm-up, its eval.jsonl

An engine in FP8 on a CPU gets the weights by a publish and answers DATA's prompts: greedily, and as
sampled. Of the same tokens transformers computes log-probabilities in float32, with the weights as
they are, and with one kind of them after the other rounded to FP8 and back. Writes
bench/results/fp8_mismatch.{json,md}.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

import httpx
import torch
from common import ROOT, provenance, write_results

sys.path.pop(0)  # this folder, whose statistics.py torch would take for Python's own
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
sys.path.insert(0, str(ROOT))

import engine_logprobs
from test_exchange import KEY, PlainSource, started
from transformers import AutoTokenizer

from megagrpo.cpu.engine.block_fp8 import dequantised
from megagrpo.mesh import make_mesh
from megagrpo.models.folder import Model
from megagrpo.models.stored.quantization import FP8_BLOCK
from megagrpo.models.table import model_tensors
from megagrpo.rollout.service.engine_model import as_engines_see_it
from megagrpo.system.run_folder import RunFolder
from megagrpo.weights.blocks import block_maxima, block_scales, quantise
from megagrpo.weights.exchange import Exchange
from tests import experiments

KINDS = {"attention": r"self_attn\.", "experts": r"\.experts\.", "both": r""}
NEW_TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    sampled, greedy = answers(args.model, prompts)
    model = engine_logprobs._load(args.model)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exact = logprobs(args.model, prompts, sampled)
    of_engine = torch.cat([answer["logprobs"] for answer in sampled])
    found = {"the engine, activations too": difference(exact, of_engine)}
    same = [
        greedy_answer(model, prompt) == answer["ids"]
        for prompt, answer in zip(prompts, greedy, strict=True)
    ]
    names = {spec.name for spec in model_tensors(Model.read(args.model).arch) if spec.in_fp8}
    for kind, pattern in KINDS.items():
        model.load_state_dict(rounded(whole, names, pattern))
        of_rounded = logprobs(args.model, prompts, sampled)
        found[f"weights of {kind}"] = difference(exact, of_rounded)
    lines = [
        (name, *(f"{value:.2e}" for value in values.values())) for name, values in found.items()
    ]
    lines.append((f"greedy answers that are the same: {sum(same)} of {len(same)}", "", "", ""))
    data = {
        **provenance(),
        "rows": found,
        "greedy_same": sum(same),
        "prompts": len(same),
        "tokens": len(exact),
    }
    header = (
        f"rounded, {len(exact)} sampled tokens",
        "mean abs difference, nats",
        "99 % are below",
        "largest",
    )
    write_results("fp8_mismatch", data, header, lines)


def answers(model: Path, prompts: list[list[int]]) -> tuple[list[dict], list[dict]]:
    """The FP8 engine's, sampled and greedy: ids and log-probabilities."""
    with tempfile.TemporaryDirectory() as folder:
        config = experiments.experiment(
            output_dir=folder,
            model={"path": str(model)},
            actor={"device": "cpu"},
            rollout={"quantization": "fp8", "max_running_requests": 64},
            weights={"transport": "reshard", "timeout_s": 120.0},
        )
        seen = as_engines_see_it(
            config, RunFolder(Path(folder) / "run")
        )  # a config.json that says FP8
        with started(seen, Path(folder)) as engine:
            mesh, source = (
                make_mesh(0, 1, torch.device("cpu"), 60.0),
                PlainSource(model).load(model),
            )
            source.fp8 = frozenset(
                s.name for s in model_tensors(Model.read(model).arch) if s.in_fp8
            )
            exchange = Exchange(config, mesh, source, engine, Path(folder))
            exchange.publish(1)
            found = [ask(engine.info.url, prompts, temperature) for temperature in (1.0, 0.0)]
            exchange.close()
    return found[0], found[1]


def ask(url: str, prompts: list[list[int]], temperature: float) -> list[dict]:
    """Ids and log-probabilities of an engine's answers."""
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": temperature}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    response = httpx.post(f"{url}/generate", json=body, headers=KEY, timeout=600).raise_for_status()
    pairs = [answer["meta_info"]["output_token_logprobs"] for answer in response.json()]
    return [
        {"ids": [p[1] for p in of], "logprobs": torch.tensor([p[0] for p in of])} for of in pairs
    ]


def logprobs(model: Path, prompts: list[list[int]], found: list[dict]) -> torch.Tensor:
    """Of all sampled tokens by transformers, with the weights that the loaded model has now."""
    pairs = zip(prompts, found, strict=True)
    return torch.cat(
        [engine_logprobs.logprobs_by(model, p + a["ids"])[len(p) - 1 :] for p, a in pairs]
    )


@torch.no_grad()
def greedy_answer(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """The most probable tokens by transformers, to the end of the answer."""
    return model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)[
        0, len(prompt) :
    ].tolist()


def rounded(
    whole: dict[str, torch.Tensor], names: set[str], pattern: str
) -> dict[str, torch.Tensor]:
    """The weights with those of `names` that fit the pattern rounded to FP8 and back; experts may
    lie together."""
    out = {}
    for name, tensor in whole.items():
        of_experts = ".experts." in name and tensor.dim() == 3
        chosen = re.search(pattern, name) and (name in names or of_experts)
        parts = tensor if of_experts else tensor[None]
        out[name] = (
            torch.stack([back(part) for part in parts]).view_as(tensor) if chosen else tensor
        )
    return out


def back(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix rounded to FP8 and back."""
    scales = block_scales(block_maxima(matrix, (0, 0)))
    return dequantised(quantise(matrix, (0, 0), scales), scales, list(FP8_BLOCK))


def difference(exact: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """Of log-probabilities of the same tokens."""
    distance = (exact - other).abs()
    return {
        "mean": float(distance.mean()),
        "p99": float(distance.quantile(0.99)),
        "largest": float(distance.max()),
    }


if __name__ == "__main__":
    main()
