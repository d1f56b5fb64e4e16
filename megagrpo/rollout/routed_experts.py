"""Reads the experts that an engine chose from its answer and checks them: not every kernel reports
them."""

import binascii
from dataclasses import replace
from itertools import combinations

import numpy as np
import pybase64

from megagrpo.families.architecture import Architecture
from megagrpo.system.errors import translated
from megagrpo.types import RolloutGroup


class WrongExperts(ValueError):
    """Raised if an answer has no experts, or some that no router can have chosen."""


def read_experts(arch: Architecture, text: str | memoryview | None, num_tokens: int) -> np.ndarray:
    """Returns the experts [num_tokens, layers with experts, k] of an answer. Raises WrongExperts.

    text: an answer's `routed_experts`, of consecutive tokens that passed through the model: all
    tokens except the last of a response; base64 of int32, of all layers, dense ones too.
    """
    if not text:
        raise WrongExperts(
            "the answer holds no routed_experts: the engine was not started with "
            "enable_return_routed_experts"
        )
    with translated(
        "routed_experts is not base64 of int32", binascii.Error, ValueError, raised=WrongExperts
    ):
        ids = np.frombuffer(pybase64.b64decode(text, validate=True), dtype="<i4")
    layers, k = arch.num_layers, arch.experts_per_token
    if len(ids) != num_tokens * layers * k:
        raise WrongExperts(
            f"routed_experts has {len(ids)} numbers, not {num_tokens} tokens x {layers} layers x "
            f"{k} experts"
        )
    found = ids.reshape(num_tokens, layers, k)[:, arch.dense_layers :]
    if found.size and (found.min() < 0 or found.max() >= arch.num_experts):
        raise WrongExperts(
            f"routed_experts has ids from {found.min()} to {found.max()}, and the model "
            "experts 0 to "
            f"{arch.num_experts - 1}"
        )
    experts = found.astype(arch.expert_id_type)
    _refuse_repeated(arch, experts)
    return experts


def _refuse_repeated(arch: Architecture, experts: np.ndarray) -> None:
    repeated = np.zeros(experts.shape[:2], np.bool_)
    # Pair by pair, in a tenth of the time that sorting takes.
    for one, other in combinations(np.ascontiguousarray(np.moveaxis(experts, 2, 0)), 2):
        repeated |= one == other
    # rows that no kernel wrote are 0; with one expert a token 0 is valid too, but not in all tokens
    # and layers
    single = arch.experts_per_token == 1 and len(experts) > 1 and arch.num_experts > 1
    if repeated.any() or (single and not experts.any()):
        layer = arch.dense_layers + int(repeated.any(0).argmax())
        raise WrongExperts(
            f"routed_experts names an expert of layer {layer} twice for a token, or is 0 "
            "everywhere: the engine's "
            "kernel for experts does not tell them; set rollout.sglang.moe_runner_backend: triton"
        )


def for_other_ranks(group: RolloutGroup) -> RolloutGroup:
    """Returns the group without experts and texts, for ranks that do not sample.

    They get the experts of their own layers with the batch; the leader grades and records the
    texts.
    """
    return replace(
        group,
        samples=tuple(replace(sample, routed_experts=None, text="") for sample in group.samples),
    )
