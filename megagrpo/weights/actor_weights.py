"""Loads the actor's weights from a Hugging Face folder and records them as copy lists."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.models.architecture import Architecture
from megagrpo.models.folder import refuse_tensors
from megagrpo.models.table import FAMILIES, is_left_out, model_tensors, table_tensors
from megagrpo.models.tensors import TensorSpec
from megagrpo.weights.copies.recorder import Copy, Recording, Specs, record_whole
from megagrpo.weights.hf_folder import HfFolder, ReadingProgress


class LoadableActor(Protocol):
    """An actor whose loading from HF tensors can be recorded."""

    arch: Architecture

    def load_hf(self, hf: Mapping[str, Tensor]) -> None:
        """Fills the parameters by slicing and copying only."""

    def map_tables(self, hf: Mapping[str, Tensor]) -> None:
        """Lets it read what stays in files."""

    def weights_loaded(self) -> None:
        """Brings everything derived from the parameters (the optimizer's copies) up to date."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Returns this rank's live parameters by name."""

    def merged(self) -> AbstractContextManager[None]:
        """Merges adapters into `parameters` inside the block, for publishing."""


@dataclass(frozen=True)
class ActorWeights:
    """The mapping from slices of Hugging Face tensors to this rank's live parameters."""

    copies: list[Copy]  # of this rank, recorded from the actor's load_hf
    hf_specs: Specs  # of all HF tensors: name -> shape and dtype in the checkpoint
    parameters: Callable[[], Mapping[str, Tensor]]  # live, under the names in `copies`
    # merges adapters; needed around any use of `parameters` as the model's weights
    merged: Callable[[], AbstractContextManager[None]] = nullcontext
    # HF tensors that are published in a fixed dtype, such as a router's bias
    fixed_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    fp8: frozenset[str] = frozenset()  # HF tensors that are in FP8 in engines with FP8 weights


def load_initial_weights(
    actor: LoadableActor, path: str | Path, overwritten: bool = False
) -> ActorWeights:
    """Loads a Hugging Face folder into the actor and records its copy list. Raises ValueError for
    an unusable folder.

    overwritten: a checkpoint is loaded next, so only names, shapes and dtypes are read, and
    parameters are 0. Elements without a source, such as a vocabulary's padding, stay 0.
    """
    hf = HfFolder(path)
    refuse_tensors(hf.path, actor.arch, hf.files)
    parameters = actor.parameters()
    actor.map_tables(hf)
    apart = {spec.name for spec in table_tensors(FAMILIES[actor.arch.family], actor.arch.ngrams)}
    specs = {
        name: spec
        for name, spec in hf.specs.items()
        if name not in apart and not is_left_out(actor.arch, name)
    }
    tensors = list(model_tensors(actor.arch))
    recording = record_whole(actor.load_hf, specs, parameters)
    dtypes = fixed_dtypes(tensors)
    _check_dtypes(recording.copies, parameters, dtypes)
    if overwritten:
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.zero_()
    else:
        read_recorded(hf, recording, parameters)
        actor.weights_loaded()
    fp8 = frozenset(spec.name for spec in tensors if spec.in_fp8)
    return ActorWeights(recording.copies, specs, actor.parameters, actor.merged, dtypes, fp8)


def fixed_dtypes(tensors: Iterable[TensorSpec]) -> dict[str, torch.dtype]:
    """Returns the HF tensors with a fixed dtype, and these dtypes."""
    return {spec.name: getattr(torch, spec.dtype) for spec in tensors if spec.dtype is not None}


def _check_dtypes(
    copies: list[Copy], parameters: Mapping[str, Tensor], fixed: Mapping[str, torch.dtype]
) -> None:
    """Asserts that no parameter rounds a tensor with a fixed dtype: digests of the rounded values
    would pass."""
    for copy in copies:
        dtype = parameters[copy.parameter].dtype
        assert fixed.get(copy.hf, dtype) == dtype, (
            f"{copy.parameter} holds HF tensor {copy.hf} in {dtype}, not in {fixed[copy.hf]}"
        )


def read_recorded(hf: HfFolder, recording: Recording, parameters: Mapping[str, Tensor]) -> None:
    """Replays recorded copies from the checkpoint files `hf`, reading only the needed ranges."""
    progress = ReadingProgress(
        sum(hf.stored_bytes(copy.hf, copy.size) for copy in recording.copies)
    )
    shown = not dist.is_initialized() or dist.get_rank() == 0
    for fill in recording.fills:
        fill.view(parameters).fill_(fill.value)
    for copy in recording.copies:
        hf.read_into(copy.view(parameters), copy.hf, copy.start)
        if shown:
            progress.show(hf.bytes_read)
