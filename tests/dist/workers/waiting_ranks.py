"""One rank that makes updates and tells where the host would wait for a device.

What makes a host wait on CUDA is seen on a CPU too: operators whose output has a size that depends on values, and
values that are read. Counted inside Megatron's schedule: what is planned before it is on the host on purpose.
"""

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import megatron.core
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megagrpo
from megagrpo.actor import schedule, step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.weights.actor_weights import load_initial_weights
from tests.dist.workers.actor_ranks import RICH, batch_of
from tests.dist.workers.harness import with_actors
from tests.dist.workers.routing_replay_ranks import with_planted

SIZED_BY_VALUES = ("nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount")
# A clone may itself lie in a folder called megagrpo.
ROOTS = tuple(f"{next(iter(package.__path__))}{os.sep}" for package in (megagrpo, megatron.core))
CPU_ONLY = ("cpu/trainer.py",)  # what it puts into Megatron where there is no CUDA
READS = ("_local_scalar_dense", "equal", "is_nonzero")
METHODS = ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__")
# What these read is on the host of a GPU machine too: split sizes that the dispatcher brought there at its one
# synchronization (`numpy` stands for the copy), index lists and states of generators that never left it, indices made
# in pinned memory, and the layout of a micro-batch, which is made of a Batch that is on the host.
ON_HOST = (
    "microbatch.py:_layout", "microbatch.py:_micro_batch", "microbatch.py:targets",
    "policy_loss.py:sums", "policy_loss.py:spread",
    "numpy token_dispatcher.py:_maybe_dtoh_and_synchronize", "token_dispatcher.py:token_dispatch",
    "moe_utils.py:sort_chunks_by_idxs", "experts.py:forward", "random.py:fork",
    "rope_utils.py:get_pos_emb_on_this_cp_rank",
)  # fmt: skip


class Waits(TorchDispatchMode):
    """Counts (operator, place): places are functions of ours or of Megatron's, with their files."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.inside = False  # an operator that is counted by its own name already
        self.micro_batches = 0

    def note(self, what: str) -> None:
        frames = [
            (frame.filename, frame.name)
            for frame in traceback.extract_stack()
            if frame.filename.startswith(ROOTS) and not frame.filename.endswith(CPU_ONLY)
        ]
        file, function = frames[-1]
        self.counts[what, f"{Path(file).name}:{function}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name.split("::")[-1], kwargs or {}
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if by_mask and name != "index":  # one number into all places of a mask: masked_fill, which torch makes of it
            by_mask = args[2].numel() > 1
        unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
        if not self.inside and (name in SIZED_BY_VALUES + READS or by_mask or unknown_size):
            self.note(name + (" by a mask" if by_mask else ""))
        return func(*args, **kwargs)

    @contextmanager
    def also_methods(self) -> Iterator[None]:
        """Methods of tensors that read them, and new tensors of host values on a device: not all are operators."""

        def noted(name: str, method: Callable) -> Callable:
            def call(*args, **kwargs):
                if self.inside:
                    return method(*args, **kwargs)
                self.note(name)
                self.inside = True
                try:
                    return method(*args, **kwargs)
                finally:
                    self.inside = False

            return call

        make = torch.tensor

        def tensor(*args, **kwargs):
            return (noted("torch.tensor", make) if kwargs.get("device") is not None else make)(*args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(patch.object(torch, "tensor", tensor))
            stack.enter_context(patch.object(torch.cuda.Event, "synchronize", noted("synchronize", lambda event: None)))
            for name in METHODS:
                stack.enter_context(patch.object(torch.Tensor, name, noted(name, getattr(torch.Tensor, name))))
            yield


@contextmanager
def watched_schedule() -> Iterator[Waits]:
    """Inside, every run of Megatron's schedule counts where it would wait."""
    waits, schedule_of = Waits(), schedule.get_forward_backward_func

    def watched():
        run_schedule = schedule_of()

        def run(**options):
            waits.micro_batches += options["num_microbatches"]
            with waits.also_methods(), waits:
                return run_schedule(**options)

        return run

    with patch.object(schedule, "get_forward_backward_func", watched):
        yield waits


def measure(actor: MegatronActor, job: dict) -> dict:
    load_initial_weights(actor, job["model"])
    batch = batch_of(actor.mesh)
    batch = with_planted(actor, batch) if actor.routing is not None else batch
    with watched_schedule() as waits:
        step.update(actor, batch, RICH, 1.0, 32)
    waited = {f"{what} {place}": count for (what, place), count in waits.counts.items()}
    found = {name: count for name, count in waited.items() if not name.endswith(ON_HOST)}
    dense = actor.arch.experts.dense_layers if actor.arch.experts else 0
    layers = [actor.arch.num_layers, actor.arch.num_layers - dense]
    return {"micro_batches": waits.micro_batches, "layers": layers, "waits": found}


def main(folder: Path) -> None:
    with_actors(folder, measure)
