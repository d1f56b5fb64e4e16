"""Recomputation and random states, under the released names."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint


class activation_recompute_forward(AbstractContextManager, ContextDecorator):  # noqa: N801  # the released name
    """Marks the passes of a recomputation, which only fp8 would treat differently."""

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False):
        super().__init__()
        self.activation_recompute = activation_recompute
        self.recompute_phase = recompute_phase

    def __exit__(self, *exc_details) -> None:
        """Lets exceptions rise."""


def is_fp8_activation_recompute_enabled() -> bool:
    """Returns False."""
    return False


def in_fp8_activation_recompute_phase() -> bool:
    """Returns False."""
    return False


def get_all_rng_states() -> dict[str, torch.Tensor]:
    """Returns no states: nothing here is random."""
    return {}


def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Computes function(*args), and again in the backward pass."""
    for name in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group"):
        kwargs.pop(name, None)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=kwargs.pop("use_reentrant", True), **kwargs)


class CudaRNGStatesTracker:
    """Keeps named states of the random generator, and swaps one in for a while."""

    def __init__(self):
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forgets every state."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Returns the states by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Takes these states."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Adds the state that a seed gives. Raises RuntimeError for a name or a seed that is there."""
        if seed in self.seeds_ or name in self.states_:
            raise RuntimeError(f"seed {seed} or state {name} already exists")
        self.seeds_.add(seed)
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng"):
        """Uses a named state inside."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)
