"""Reads the experts that an engine chose from its answer and checks them: not every kernel reports them."""

import base64
import binascii
from dataclasses import dataclass, replace

import numpy as np

from megagrpo.families.architecture import Architecture
from megagrpo.system.explained import translated
from megagrpo.types import RolloutGroup


class WrongExperts(ValueError):
    """Raised if an answer has no experts, or some that no router can have chosen."""


@dataclass(frozen=True)
class RoutedExperts:
    """The format of a model's experts in an answer: all layers, dense ones too, as base64 of int32."""

    num_layers: int
    dense_layers: int  # the first ones, which have no experts
    num_experts: int
    top_k: int
    type: str  # of an id, as the trainer keeps it

    @classmethod
    def of(cls, arch: Architecture) -> "RoutedExperts":
        """Describes a model with experts."""
        return cls(arch.num_layers, arch.dense_layers, arch.num_experts, arch.experts_per_token, arch.expert_id_type)

    def read(self, text: str | None, num_tokens: int) -> np.ndarray:
        """Returns the experts [num_tokens, layers with experts, k]. Raises WrongExperts.

        text: an answer's `routed_experts`, of consecutive tokens that passed through the model: all tokens except the
        last of a response.
        """
        if not text:
            raise WrongExperts(
                "the answer holds no routed_experts: the engine was not started with enable_return_routed_experts"
            )
        with translated("routed_experts is not base64 of int32", binascii.Error, ValueError, raised=WrongExperts):
            ids = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
        of_token = self.num_layers * self.top_k
        if len(ids) != num_tokens * of_token:
            raise WrongExperts(
                f"routed_experts has {len(ids)} numbers, not {num_tokens} tokens x {self.num_layers} layers x "
                f"{self.top_k} experts"
            )
        experts = ids.reshape(num_tokens, self.num_layers, self.top_k)[:, self.dense_layers :]
        self._check(experts)
        return experts.astype(self.type)

    def _check(self, experts: np.ndarray) -> None:
        if not experts.size:
            return
        if experts.min() < 0 or experts.max() >= self.num_experts:
            raise WrongExperts(
                f"routed_experts has ids from {experts.min()} to {experts.max()}, and the model experts 0 to "
                f"{self.num_experts - 1}"
            )
        in_order = np.sort(experts, axis=2)
        repeated = (in_order[:, :, 1:] == in_order[:, :, :-1]).any(2)
        # rows that no kernel wrote are 0; with one expert a token 0 is valid too, but not in all tokens and layers
        if repeated.any() or (self.top_k == 1 and len(experts) > 1 and self.num_experts > 1 and not experts.any()):
            layer = self.dense_layers + int(repeated.any(0).argmax())
            raise WrongExperts(
                f"routed_experts names an expert of layer {layer} twice for a token, or is 0 everywhere: the engine's "
                "kernel for experts does not tell them; set rollout.sglang.moe_runner_backend: triton"
            )


def for_other_ranks(group: RolloutGroup) -> RolloutGroup:
    """Returns the group without experts and texts, for ranks that do not sample.

    They get the experts of their own layers with the batch; the leader grades and records the texts.
    """
    return replace(group, samples=tuple(replace(sample, routed_experts=None, text="") for sample in group.samples))
