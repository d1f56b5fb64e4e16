"""What the certificate measures on: a tiny model of the experiment's own architecture, and one step's made-up samples."""

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from megagrpo.config.schema import ExperimentConfig, ParallelConfig, TinyModelConfig
from megagrpo.hf_files import write_hf_folder
from megagrpo.tiny.description import hf_config
from megagrpo.tiny.model import random_tensors
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample

VOCAB = 131  # no tensor-parallel size divides it: padded vocabularies are part of every certificate
NUM_GROUPS, MAX_PROMPT, MAX_RESPONSE = 5, 10, 24
_SIZES = {
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
}
_SIZES |= {
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "max_position_embeddings",
    "dtype",
}
_SIZES |= {
    "vocab_size",
    "torch_dtype",
    "layer_types",
    "max_window_layers",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}


def make_models(folder: Path, config: ExperimentConfig, parallel: ParallelConfig, seed: int) -> dict:
    """Write HF folders `model` and `reference` with the experiment's family and options at tiny sizes that `parallel` can cut.

    Returns their config.json. The reference is the model with a little noise, as if some updates had been made. All tensors are
    random, norms and biases too: a mistake that leaves one of them out must show. ValueError when the experiment's
    model is neither there nor in its prepare section.
    """
    real = _real_config(config)
    family = real["model_type"]
    kv_heads = math.lcm(2, parallel.tp)  # the standing layouts cut by 2
    grouped = real["num_attention_heads"] != real.get("num_key_value_heads", real["num_attention_heads"])
    sizes = TinyModelConfig(
        path=str(folder / "model"),
        family=family,
        hidden_size=16 * kv_heads * (1 + grouped),
        num_layers=math.lcm(4, parallel.pp * parallel.vpp),
        num_heads=kv_heads * (1 + grouped),
        num_kv_heads=kv_heads,
        head_dim=16,
        ffn_size=32 * kv_heads,
        num_experts=math.lcm(8, 2 * parallel.ep),
        experts_per_token=min(real.get("num_experts_per_tok", 2), 4),
        expert_ffn_size=32 * parallel.etp,
        tie_embeddings=bool(real.get("tie_word_embeddings", False)),
    )
    options = {key: value for key, value in real.items() if key not in _SIZES}
    tiny = hf_config(sizes) | options | {"vocab_size": VOCAB, "num_hidden_layers": sizes.num_layers}
    generator = torch.Generator().manual_seed(seed)
    tensors = random_tensors(sizes, VOCAB, generator)
    tensors = {
        name: t if t.dim() > 1 else t + 0.2 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()
    }
    reference = {
        name: near(t, 0.02 * float(t.std()), seed + number) for number, (name, t) in enumerate(tensors.items())
    }
    description = folder / "description"
    description.mkdir(parents=True, exist_ok=True)
    (description / "config.json").write_text(json.dumps(tiny, indent=2))
    for name, values in (("model", tensors), ("reference", reference)):
        write_hf_folder(folder / name, iter([values]), like=description, dtype=torch.float32)
    return tiny


def _real_config(config: ExperimentConfig) -> dict:
    path = Path(config.model.path) / "config.json"
    if path.is_file():
        return json.loads(path.read_text())
    if config.prepare is not None and config.prepare.model is not None:
        return hf_config(config.prepare.model)
    raise ValueError(f"{path} does not exist: the certificate needs to know the experiment's architecture")


def make_groups(config: ExperimentConfig, seed: int) -> list[RolloutGroup]:
    """A step's groups: lengths 1 to MAX_RESPONSE, a group of equal rewards, a failed grader, a truncated response, a masked hole."""
    generator = torch.Generator().manual_seed(seed)
    size = min(max(config.train.group_size, 2), 4)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCAB, (count,), generator=generator).tolist())

    groups = []
    for g in range(NUM_GROUPS):
        samples, outcomes = [], []
        for index in range(size):
            length = MAX_RESPONSE if (g, index) == (1, 0) else number(1, MAX_RESPONSE)
            hole = tuple(int(not 2 <= t < 4) for t in range(length)) if g == 2 else None
            finish = "length" if length == MAX_RESPONSE else "stop"
            samples.append(Sample(index, tokens(length), (0.0,) * length, finish, 0, "", hole))
            reward = 1.0 if g == 0 else number(0, 4) / 4
            outcomes.append(Outcome("error", detail="planted") if (g, index) == (3, 1) else Outcome("score", reward))
        greedy = (
            (Sample(0, (1,), (0.0,), "stop", 0, ""), Outcome("score", 0.5))
            if config.algorithm.needs_greedy_response
            else (None, None)
        )
        groups.append(
            RolloutGroup(g, Prompt(g, "", tokens(number(2, MAX_PROMPT)), ""), tuple(samples), tuple(outcomes), *greedy)
        )
    return groups


def near(values: Tensor, spread: float, seed: int) -> Tensor:
    return values + spread * torch.randn(values.shape, generator=torch.Generator().manual_seed(seed))


def longest(config: ExperimentConfig) -> int:
    """The maximum response length that the algorithm is told."""
    overlong = config.algorithm.reward.overlong
    return max(MAX_RESPONSE, overlong.buffer(MAX_RESPONSE) if overlong else 0)
