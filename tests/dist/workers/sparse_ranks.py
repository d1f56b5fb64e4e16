"""One rank of the tests of sparse attention: against transformers with mistakes planted, and what
becomes of the frozen indexer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch

from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.optimizer import optimizer_tensors
from megagrpo.models.kinds.indexed import layer as sparse_attention
from megagrpo.models.kinds.indexed.layer import Indexer, SparseAttention
from megagrpo.weights.actor_weights import ActorWeights, load_initial_weights
from megagrpo.weights.hf_folder import HfFolder
from tests.dist.workers.actor_ranks import RICH, batch_of, forward_job, gradient
from tests.dist.workers.harness import over_ranks, with_actors


def _other_rotary_form() -> AbstractContextManager:
    right = sparse_attention.apply_rotary_pos_emb

    def turned(*args, mla_rotary_interleaved: bool, **kwargs):
        return right(*args, mla_rotary_interleaved=not mla_rotary_interleaved, **kwargs)

    return patch.object(sparse_attention, "apply_rotary_pos_emb", turned)


def _next_key() -> AbstractContextManager:
    right = SparseAttention._chosen

    def chosen(self, *given):
        found = right(self, *given).roll(1, -1)
        found[..., 0] = True  # a row without keys would be NaN, which anyone sees
        return found & given[-1]

    return patch.object(SparseAttention, "_chosen", chosen)


def _no_choice() -> AbstractContextManager:
    return patch.object(SparseAttention, "_chosen", lambda self, *given: given[-1])


def _norm_without_bias() -> AbstractContextManager:
    right = Indexer.forward_before_topk

    def scored(self, *args):
        with torch.no_grad():
            self.k_norm.bias.zero_()
        return right(self, *args)

    return patch.object(Indexer, "forward_before_topk", scored)


def _trained() -> AbstractContextManager:
    """As if a loss of its own had moved it."""
    right = MegatronActor.optimizer_step

    def step(self, *args, **kwargs):
        for module in self.chunks[0].modules():
            if isinstance(module, Indexer):
                module.wk.weight.data.mul_(1.001)
        return right(self, *args, **kwargs)

    return patch.object(MegatronActor, "optimizer_step", step)


FAULTS: dict[str, Callable[[], AbstractContextManager]] = {
    "other rotary form": _other_rotary_form,
    "next key": _next_key,
    "no choice": _no_choice,
    "norm without bias": _norm_without_bias,
    "trained": _trained,
}


def frozen_job(actor: MegatronActor, weights: ActorWeights, job: dict, folder: Path) -> dict:
    """The indexers of this rank after an update."""
    gradient(actor, batch_of(actor.mesh), RICH)
    actor.optimizer_step()
    live = actor.parameters()
    source = HfFolder(job["model"])
    held = {copy.hf: copy for copy in weights.copies if ".indexer." in copy.hf}
    stepped = {t.untyped_storage()._cdata for t in optimizer_tensors(actor.optimizer)}
    found = {name: copy.view(live) for name, copy in held.items()}
    norms = [tensor.dtype for name, tensor in found.items() if ".k_norm." in name]
    return {
        "tensors": len(found),
        "whole": all(tensor.shape == source[name].shape for name, tensor in found.items()),
        "unmoved": all(
            torch.equal(tensor, source[name].to(tensor.dtype)) for name, tensor in found.items()
        ),
        "float32_norms": set(norms) == {torch.float32},
        "stepped": sorted(
            name for name, tensor in found.items() if tensor.untyped_storage()._cdata in stepped
        ),
        "trained": sorted(found.keys() & {c.hf for c in actor.trained_weights(weights).copies}),
        "with_gradient": sorted(name for name, copy in held.items() if live[copy.parameter].requires_grad),
    }  # fmt: skip


JOBS = {"forward": forward_job, "frozen": frozen_job}


def main(folder: Path) -> None:
    def measure(actor: MegatronActor, job: dict) -> dict:
        with FAULTS[job["fault"]]() if "fault" in job else nullcontext():
            weights = load_initial_weights(actor, job["model"])
            return over_ranks(actor, JOBS[job["do"]](actor, weights, job, folder))

    with_actors(folder, measure)
