"""The interface of a weight transport.

To add one: a file NAME.py here with a class that has the methods of Transport, a row in
`TRANSPORTS` (exchange.py), and NAME among the choices of `weights.transport` (config/rollout.py; a
test compares the two).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megagrpo.mesh import Mesh
from megagrpo.weights.copies.recorder import Copy, Specs
from megagrpo.weights.wire.clock import PhaseTimer
from megagrpo.weights.wire.engine_group import GroupLimits
from megagrpo.weights.wire.moving import Traffic

if TYPE_CHECKING:  # digests are computed where there is no HTTP client, too
    from megagrpo.weights.engines.client import EngineConnection
    from megagrpo.weights.engines.fleet import EngineFleet


@dataclass(frozen=True)
class TrainerWeights:
    """The trainers' side of every transfer. `copies`, `specs` and the settings are the same on
    every rank."""

    mesh: Mesh
    # HF tensors: name -> shape and published dtype; values are cast to it before they travel
    specs: Specs
    # by trainer rank: which slice of which HF tensor is where in the rank's parameters
    copies: list[list[Copy]]
    # this rank's live parameters, under the names in `copies`
    parameters: Callable[[], Mapping[str, Tensor]]
    # published, for config.json: of all tensors without a fixed dtype
    dtype: torch.dtype
    bucket_bytes: int  # the most that a rank stages, as far as the transport can choose
    num_engines: int  # of the experiment
    folder: Path  # of this run, for weights that are published through files
    checkpoint: Path  # HF folder whose config.json and tokenizer describe the model
    limits: GroupLimits  # of groups with engines
    delta: bool = False  # send only changes since the last publish, if the transport can


class Transport(Protocol):
    """Puts the trainers' live weights into the engines' live parameters. Every trainer rank has
    one, for the whole run.

    It knows the slices of every trainer rank (`TrainerWeights.copies`) and, on rank 0, the slices of
    every engine rank (`EngineFleet.kinds`), and decides which rank sends which elements to
    which. It holds the state of connections (a process group, a plan) by engine id. A transport
    without state leaves out `drop` and `leave`. In the order of a run:

    1. `__init__(weights)`: on every rank, once. May be collective.
    2. A publish connects to the engines of its round and pauses them; new ones report their slices.
    3. `transfer`: on every rank, once per round. Connects to new engines, then moves the weights.
    4. The exchange compares digests of the live parameters, without the transport.
    5. `drop`: on rank 0, whenever an engine is gone. If it comes back, it counts as new: 2 and 3 run
       for it again.
    6. `leave`: on rank 0, for every engine that is alive when the run ends.
    """

    # whether it writes live parameters itself, without the model's own load_weights
    past_loader: bool

    def transfer(self, version: int, engines: "EngineFleet", timer: PhaseTimer) -> Traffic:
        """Collective. Moves the current weights, called `version`, into all engines of the round.

        `engines.for_each` runs the HTTP part, one thread per engine; on ranks other than 0 it does
        nothing. An engine that dies raises EngineDown inside `for_each` and is given up (`drop`)
        while the others go on; no rank may wait for it longer than `EngineConnection.patience`.
        Every other failure is raised on every rank (Mesh.from_main). If the engine's call needs a
        weight-update session, the transport opens and closes it (`EngineConnection.begin`, `end`).
        timer: takes the phases that a transport reports, such as "gather"; the rest counts as
        "transfer". Returns this rank's traffic.
        """

    def drop(self, engine: "EngineConnection") -> None:
        """Drops an engine that died, was drained or restarted, and ends all waits for it.

        On rank 0, in any thread, perhaps twice for one engine; raises nothing. If other ranks have
        connections too, the next `transfer` must inform them.
        """

    def leave(self, engine: "EngineConnection") -> None:
        """Makes a living engine forget the connection. On rank 0, before `drop`. May raise
        EngineDown, EngineRefused."""
