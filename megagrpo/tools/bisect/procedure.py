"""Runs the same tokens through the engine and the actor: the residual stream, then the first layer
that differs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.mesh import Mesh
from megagrpo.tools.bisect.capture import (
    CapturedForward,
    captured_forward,
    distinct_images,
    head_logprobs,
)
from megagrpo.tools.bisect.compare import BOUNDS, Bounds, bound_at, compare_points, difference
from megagrpo.tools.bisect.compared_points import (
    FINAL_NORM,
    Point,
    Sizes,
    depth_before,
    final_norm,
    layer_points,
    residual_points,
)
from megagrpo.tools.bisect.engine import Prefilled, ProbedEngine, Sequenced
from megagrpo.tools.bisect.findings import OUTPUT, Findings, Pass, layer_to_open
from megagrpo.tools.bisect.hooks import SeenTokens
from megagrpo.tools.bisect.sides import from_engine, from_trainer
from megagrpo.types import Batch, Prompt, Rewards, Routing

T = TypeVar("T")


@dataclass(frozen=True)
class _Job:
    """The inputs of every step of one bisection."""

    actor: MegatronActor
    engine: ProbedEngine | None  # on the main rank
    folder: Path  # on a disk of all ranks
    batch: Batch
    sequences: list[Sequenced]
    bounds: Bounds
    notes: list[str]

    @property
    def mesh(self) -> Mesh:
        return self.actor.mesh

    @property
    def lengths(self) -> list[int]:
        return [len(sequence.tokens) for sequence in self.sequences]

    @property
    def sizes(self) -> Sizes:
        vision = self.actor.arch.vision
        grids = [image.grid for image in distinct_images(self.batch).values()]
        features = [vision.tokens(grid) for grid in grids] if vision else []
        return {
            "tokens": self.lengths,
            "patches": list(map(math.prod, grids)),
            "features": features,
        }

    @property
    def is_text(self) -> Tensor:
        """[T'] bool: the second and later tokens of all sequences, without those of images."""
        return torch.tensor([text for sequence in self.sequences for text in sequence.is_text[1:]])


def bisect_pair(
    actor: MegatronActor,
    engine: ProbedEngine | None,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    folder: Path,
    bounds: Bounds | None = None,
    version: int | None = None,
) -> Findings | None:
    """Collective. Compares an engine (on the main rank) with the actor; returns the findings, on
    the main rank.

    folder: on a disk of all ranks. bounds: default, those of the actor's dtype. version: expected
    of the engine's weights; None: any.
    """
    mesh = actor.mesh
    vision = actor.arch.vision
    # in a request that goes on with a response, a placeholder would stand for one more image
    stop = (vision.image_token_id, vision.video_token_id) if vision else ()
    sequences = mesh.from_main(
        lambda: _on_main(engine).sample(prompts, max_new_tokens, stop), "sample responses"
    )
    bounds = bounds or BOUNDS[actor.config.dtype]
    job = _Job(actor, engine, folder, batch_of_sequences(sequences), sequences, bounds, [])
    # prompts without images
    points = [point for point in residual_points(actor.arch) if sum(job.sizes[point.unit])]
    prefilled, ids = _prefill(job, points, with_experts=True)
    title = "residual stream" if ids is None else "residual stream, the engine's experts replayed"
    stream, logprobs = _compare(job, title, points, prefilled, ids)
    passes = [stream, _outputs(job, prefilled, logprobs)]
    if (layer := layer_to_open(passes)) is not None:
        inside = layer_points(actor.arch, layer)
        again, _ = _prefill(job, inside, with_experts=False)
        within, _ = _compare(job, f"inside layer {layer}", inside, again, ids)
        passes.append(replace(within, inside=True))
    if not mesh.is_main:
        return None
    versions = {sequence.version for sequence in sequences} - {str(version)}
    stale = [
        f"the engine calls its weights version {name}, the trainers have {version}"
        for name in sorted(versions)
        if version is not None
    ]
    return Findings(stale, passes, list(dict.fromkeys(job.notes)), job.lengths, job.bounds)


def _on_main(value: T | None) -> T:
    assert value is not None, "only the main rank has it"
    return value


def _prefill(
    job: _Job, points: Sequence[Point], with_experts: bool
) -> tuple[Prefilled | None, Routing | None]:
    """Collective. Returns the engine's records, on the main rank, and on every rank the experts of
    all layers that have some; None without `with_experts`, experts or records of them.
    """
    kept: list[Prefilled] = []  # not sent to other ranks

    def ask() -> Routing | None:
        kept.append(_on_main(job.engine).prefill(job.sequences, [point.engine for point in points]))
        return _routed(job, kept[0]) if with_experts else None

    ids = job.mesh.from_main(ask, "compute on the engine")
    return (kept[0] if kept else None), ids


def _routed(job: _Job, prefilled: Prefilled) -> Routing | None:
    arch = job.actor.arch
    seen = prefilled.ranks[0]
    if not arch.is_moe:
        return None
    experts = []
    for layer in arch.routed_layers:
        calls = seen.get(f"layers.{layer}.experts", [])
        if sum(map(len, calls)) != sum(job.lengths):
            missing = f"the engine has no record of those of layer {layer} for every token"
            job.notes.append(f"experts are not replayed: {missing}")
            return None
        experts.append(torch.cat(list(calls))[:, : arch.routed.per_token].long())
    return Routing(torch.stack(experts, 1), job.batch.lengths)


def _compare(
    job: _Job, title: str, points: Sequence[Point], prefilled: Prefilled | None, ids: Routing | None
) -> tuple[Pass, Tensor]:
    """Collective. Runs the actor over the batch and compares. Also returns the actor's
    log-probabilities [T]."""
    forward = captured_forward(job.actor, job.batch, [point.trainer for point in points], ids)
    pieces = _gather(job, forward)
    arch = job.actor.arch

    def both() -> Pass:
        seen = _on_main(prefilled)
        engine = from_engine(points, seen.ranks, job.sizes, arch)
        trainer = from_trainer(points, pieces, job.sizes, arch)
        differences, flips, unlike = compare_points(
            points, engine.values, trainer.values, job.sizes, job.bounds
        )
        job.notes.extend(
            [*seen.problems, *forward.problems, *engine.notes, *trainer.notes, *unlike]
        )
        return Pass(title, differences, flips)

    return job.mesh.from_main(both, f"compare: {title}"), forward.logprobs


def _gather(job: _Job, forward: CapturedForward) -> list[SeenTokens]:
    """Collective. Returns the pieces of all ranks on the main rank, through files: they may be
    gigabytes."""
    file = job.folder / f"trainer_rank{job.mesh.rank}.pt"
    needed = job.mesh.dp_rank == 0  # other data-parallel ranks compute the same of the same batch
    if needed:
        torch.save([tuple(piece) for piece in forward.pieces], file)
    written = job.mesh.gather_world(needed)
    pieces: list[SeenTokens] = []
    if job.mesh.is_main:
        for rank in (rank for rank, has in enumerate(written) if has):
            other = job.folder / f"trainer_rank{rank}.pt"
            pieces += [SeenTokens(*fields) for fields in torch.load(other)]
            other.unlink()
    job.mesh.gather_world(None)  # the next files are written after these are read
    return pieces


def _outputs(job: _Job, prefilled: Prefilled | None, logprobs: Tensor) -> Pass:
    """Collective. Compares log-probabilities: of the head on the engine's last hidden states, of
    the whole forward, and of decoding with prefill inside the engine. logprobs: the actor's, [T].
    """
    hidden, tokens = job.mesh.from_main(
        lambda: _head_inputs(job, _on_main(prefilled)), "send hidden states"
    )
    head = head_logprobs(job.actor, hidden, tokens) if hidden is not None else None
    heads = [
        values
        for values in job.mesh.gather_world(None if head is None else head.cpu())
        if values is not None
    ]
    compare = partial(_output_pass, job, prefilled, heads, logprobs)
    return job.mesh.from_main(compare, "compare log-probabilities")


def _output_pass(
    job: _Job, prefilled: Prefilled | None, heads: Sequence[Tensor], logprobs: Tensor
) -> Pass:
    prefilled = _on_main(prefilled)
    differences = []
    shorter = [length - 1 for length in job.lengths]
    text = job.is_text
    engine = torch.tensor(list(chain(*prefilled.logprobs)), dtype=torch.float64).where(text, 0.0)
    if heads:
        says = "output layer and log-softmax, on the engine's last hidden states"
        ours = heads[0].where(text, 0.0)
        differences.append(difference("head", says, engine, ours, shorter, job.bounds.head))
    bound = bound_at(job.bounds.relative, depth_before(job.actor.arch, job.actor.arch.num_layers))
    ours = torch.cat([row[1:] for row in logprobs.split(job.lengths)]).where(text, 0.0)
    differences.append(difference("logprobs", "log-probabilities", engine, ours, shorter, bound))
    decoded = [sequence.logprobs for sequence in job.sequences]
    sizes = list(map(len, decoded))
    prefill = [row[-n:] for row, n in zip(engine.split(shorter), sizes, strict=True)]
    says = "log-probabilities of decoding against prefill, inside the engine"
    decode = torch.tensor(list(chain(*decoded)), dtype=torch.float64)
    differences.append(difference("decode", says, torch.cat(prefill), decode, sizes, bound))
    return Pass(OUTPUT, differences)


def _head_inputs(job: _Job, prefilled: Prefilled) -> tuple[Tensor | None, Tensor]:
    """Returns the engine's last hidden states [n, h] that predict a token, None without a record,
    and these tokens."""
    tokens = torch.tensor([token for sequence in job.sequences for token in sequence.tokens[1:]])
    side = from_engine([final_norm(job.actor.arch)], prefilled.ranks, job.sizes, job.actor.arch)
    if FINAL_NORM not in side.values:
        return None, tokens
    parts = side.values[FINAL_NORM].split(job.lengths)
    return torch.cat([part[:-1] for part in parts]), tokens


def batch_of_sequences(sequences: Sequence[Sequenced]) -> Batch:
    """Returns all sequences as the batch of every data-parallel rank; each token but the first
    counts as sampled."""
    lengths = torch.tensor([len(sequence.tokens) for sequence in sequences])
    tokens = torch.tensor(
        [token for sequence in sequences for token in sequence.tokens], dtype=torch.int32
    )
    sampled = torch.ones(len(tokens), dtype=torch.bool)
    sampled[lengths.cumsum(0) - lengths] = False
    count = len(sequences)
    ids = torch.arange(len(sequences))
    return Batch(
        sample_ids=ids,
        group_ids=ids,
        num_groups=count,
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=torch.tensor([len(sequence.prompt.token_ids) for sequence in sequences]),
        loss_mask=sampled,
        rollout_logprobs=torch.zeros(len(tokens)),
        rewards=Rewards(
            torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.bool)
        ),
        truncated=torch.zeros(count, dtype=torch.bool),
        images=tuple(sequence.prompt.images for sequence in sequences),
    )
