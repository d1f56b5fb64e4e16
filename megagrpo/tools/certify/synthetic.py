"""The subject of a certificate: a tiny model of the experiment's family, and synthetic samples."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megagrpo.check.rules.subject import model_description
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.schema import ExperimentConfig, ParallelConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.config_json import text_part
from megagrpo.models.table import architecture_of
from megagrpo.tools.certify.tiny_model import TinySizes, hf_config, random_tensors, size_keys
from megagrpo.types import ImageRef, Outcome, Prompt, RolloutGroup, Sample, TeacherScores
from megagrpo.weights.hf_folder import write_hf_folder

VOCAB = 131  # no tensor-parallel size divides it: padded vocabularies are part of every certificate
NUM_GROUPS = 5
MAX_PROMPT = 10
MAX_RESPONSE = 24
# patches, of 4 and 2 tokens
_SQUARE = (1, 4, 4)
_FLAT = (1, 2, 4)
# of every third group's prompt, if the model sees
IMAGES = ((), (ImageRef("a", 1, _SQUARE),), (ImageRef("b", 1, _FLAT), ImageRef("a", 4, _SQUARE)))


def make_models(
    folder: Path, config: ExperimentConfig, parallel: ParallelConfig, seed: int
) -> Architecture:
    """Writes HF folders `model`, `reference` and `neighbor`: the experiment's family and options, at
    sizes that `parallel` can cut.

    Returns their architecture. The reference is the model with a little noise, as if some updates
    had been made; the neighbor's are the next floats, above or below. All tensors are random, norms
    and biases too: a mistake that leaves one of them out must show. Raises ValueError when the
    experiment's model has no config.json.
    """
    real = model_description(config)
    if real is None:
        path = f"{config.model.path}/config.json"
        raise ValueError(f"{path} does not exist: the certificate needs the model's architecture")
    arch = architecture_of(real)
    tiny = _description(real, _tiny_sizes(arch, parallel))
    small = architecture_of(tiny)
    generator = torch.Generator().manual_seed(seed)
    tensors = random_tensors(small, generator)
    for name, t in tensors.items():
        if t.dim() == 1 or not t.any():  # biases of experts together are matrices of 0
            tensors[name] = t + 0.2 * torch.randn(t.shape, generator=generator)
    numbers = {name: t for name, t in tensors.items() if t.is_floating_point()}
    noisy = enumerate(numbers.items(), start=seed)
    reference = {  # of one number the unbiased deviation is none
        name: near(t, 0.02 * float(t.std(correction=0)), number) for number, (name, t) in noisy
    }
    neighbor = {name: torch.nextafter(t, reference[name]) for name, t in numbers.items()}
    description = folder / "description"
    description.mkdir(parents=True, exist_ok=True)
    (description / "config.json").write_text(json.dumps(tiny, indent=2))
    for name, values in (("model", tensors), ("reference", reference), ("neighbor", neighbor)):
        shard = tensors | values  # tables of experts stay
        write_hf_folder(folder / name, iter([shard]), like=description, dtype=torch.float32)
    return small


def _tiny_sizes(arch: Architecture, parallel: ParallelConfig) -> TinySizes:
    """Returns sizes that the standing layouts, which cut by 2, and the experiment's can cut."""
    attention = arch.attention
    experts = arch.experts
    # context-parallel ranks divide the heads of recurrent layers, too
    least, ranks = (4, parallel.tp * parallel.cp) if arch.recurrent else (2, parallel.tp)
    shards = math.lcm(least, ranks)
    # twice the key/value heads if groups share one
    heads = shards * (1 + (attention.heads != attention.kv_heads))
    kv_heads = shards
    if attention.kv_heads < parallel.tp:  # fewer than the experiment's ranks stay fewer
        kv_heads = math.gcd(attention.kv_heads, parallel.tp)
    expert_shards = parallel.etp
    if experts and experts.shared_ffn_size:
        expert_shards = math.lcm(parallel.tp, parallel.etp)
    return TinySizes(
        family=arch.family,
        hidden_size=16 * heads,
        num_layers=math.lcm(4, parallel.pp * parallel.vpp),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=16,
        ffn_size=32 * shards,
        num_experts=math.lcm(8, 2 * parallel.ep),
        experts_per_token=min(experts.per_token, 4) if experts else 1,
        expert_ffn_size=32 * expert_shards,
        tie_embeddings=arch.tied,
    )


def _description(real: dict[str, object], sizes: TinySizes) -> dict[str, object]:
    """Returns config.json of a model of these sizes with the options of a real one."""
    changed = size_keys(sizes.family)
    real = text_part(real)
    options = {key: value for key, value in real.items() if key not in changed}
    # parts that not every model has
    for key in ("q_lora_rank", "n_shared_experts", "first_k_dense_replace"):
        if not real.get(key, 1):
            options[key] = real[key]
    if "n_group" in real and (real["n_group"] or 1) == 1:
        options |= {"n_group": 1, "topk_group": 1}
    made = {key: value for key, value in hf_config(sizes).items() if key in real or key in changed}
    return made | options | {"vocab_size": VOCAB, "num_hidden_layers": sizes.num_layers}


def make_groups(config: ExperimentConfig, seed: int, arch: Architecture) -> list[RolloutGroup]:
    """Returns a step's groups.

    Lengths are 1 to MAX_RESPONSE; there are a group of equal rewards, a failed grader, a truncated
    response, a masked hole. With actor.routing_replay rollout every token has experts, drawn at
    random; with several components of the loss all groups but one have a teacher, and a
    demonstration.
    """
    generator = torch.Generator().manual_seed(seed)
    size = min(max(config.train.group_size, 2), 4)
    greedy = Sample(0, np.ones(1), np.zeros(1), "stop", 0, ""), Outcome("score", 0.5)
    baseline = greedy if config.algorithm.needs_greedy_response else (None, None)
    groups = []
    for g in range(NUM_GROUPS):
        drawn = [_drawn_sample(g, index, generator) for index in range(size)]
        samples, outcomes = zip(*drawn, strict=True)
        images = () if arch.vision is None else IMAGES[g % 3]
        shortest = 2
        if arch.vision is not None:
            ends = [image.start + 1 + arch.vision.tokens(image.grid) for image in images]
            shortest = max([shortest, *ends])
        tokens = _tokens(_number(shortest, MAX_PROMPT, generator), generator)
        prompt = Prompt(g, "", tokens, "", images=images)
        groups.append(RolloutGroup(g, prompt, samples, outcomes, *baseline))
    if config.graders_apart:
        groups = [_graded_apart(group, list(config.graders_apart), generator) for group in groups]
    if config.actor.routing_replay == "rollout":
        groups = [_with_experts(group, arch, generator) for group in groups]
    if config.algorithm.components:
        groups = [_with_streams(group, config.algorithm, generator) for group in groups]
    return groups


def _number(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def _tokens(count: int, generator: torch.Generator) -> np.ndarray:
    return torch.randint(3, VOCAB, (count,), generator=generator).numpy()


def _drawn_sample(g: int, index: int, generator: torch.Generator) -> tuple[Sample, Outcome]:
    """Returns a sample of group `g` and its outcome."""
    length = MAX_RESPONSE if (g, index) == (1, 0) else _number(1, MAX_RESPONSE, generator)
    indices = np.arange(length)
    hole = (indices < 2) | (indices >= 4) if g == 2 else None
    finish = "length" if length == MAX_RESPONSE else "stop"
    tokens = _tokens(length, generator)
    sample = Sample(index, tokens, np.zeros(length), finish, 0, "", hole)
    reward = 1.0 if g == 0 else _number(0, 4, generator) / 4
    if (g, index) == (3, 1):
        return sample, Outcome("error", detail="planted")
    return sample, Outcome("score", reward, token_rewards=((0, reward / 2),))


def _graded_apart(
    group: RolloutGroup, graders: Sequence[str], generator: torch.Generator
) -> RolloutGroup:
    """Returns the group with a score of each grader for its responses."""

    def drawn(outcome: Outcome) -> Outcome:
        scores = [Outcome("score", _number(0, 4, generator) / 4) for _ in graders]
        return replace(outcome, parts=dict(zip(graders, scores, strict=True)))

    return replace(group, outcomes=tuple(map(drawn, group.outcomes)))


def _with_experts(
    group: RolloutGroup, arch: Architecture, generator: torch.Generator
) -> RolloutGroup:
    """Returns the group with experts of its samples' tokens: any, so that a router left to itself
    would not agree."""

    def drawn(sample: Sample) -> Sample:
        num_read = len(group.prompt.token_ids) + len(sample.token_ids) - 1
        scores = torch.rand(num_read, arch.expert_layers, arch.routed.count, generator=generator)
        experts = scores.topk(arch.routed.per_token).indices.numpy()
        return replace(sample, routed_experts=experts.astype(arch.routed.id_type))

    return replace(group, samples=tuple(map(drawn, group.samples)))


def _with_streams(
    group: RolloutGroup, algorithm: AlgorithmConfig, generator: torch.Generator
) -> RolloutGroup:
    """Returns the group with the scores of a teacher, which are close to a random model's, and a
    demonstration."""
    if group.group_id == 0:
        return group
    options = algorithm.distillation

    def scores(*shape: int) -> np.ndarray:
        return (torch.rand(shape, generator=generator) - 1 - math.log(VOCAB)).numpy()

    def scored(sample: Sample) -> Sample:
        length = len(sample.token_ids)
        teacher = TeacherScores(scores(length))
        if options is not None and (k := options.num_candidates):
            drawn = torch.rand(length, VOCAB, generator=generator).topk(k).indices
            teacher = replace(teacher, top_ids=drawn.numpy(), top_logprobs=scores(length, k))
        return replace(sample, teacher=teacher if options is not None else None)

    shown = _tokens(_number(1, MAX_RESPONSE, generator), generator)
    prompt = replace(group.prompt, demonstration=shown)
    return replace(group, prompt=prompt, samples=tuple(map(scored, group.samples)))


def pixels(key: str, arch: Architecture) -> Tensor:
    """Returns the patches of one of IMAGES, at random."""
    assert arch.vision is not None
    grid = next(image.grid for images in IMAGES for image in images if image.key == key)
    return near(torch.zeros(math.prod(grid), arch.vision.patch_values), 1.0, ord(key))


def near(values: Tensor, spread: float, seed: int) -> Tensor:
    """Returns values of any shape with normal noise of standard deviation `spread`."""
    return values + spread * torch.randn(
        values.shape, generator=torch.Generator().manual_seed(seed)
    )


def longest(config: ExperimentConfig) -> int:
    """Returns the maximum response length in tokens, an argument of the algorithm."""
    overlong = config.algorithm.reward.overlong
    return max(MAX_RESPONSE, overlong.buffer(MAX_RESPONSE) if overlong else 0)
