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
from megagrpo.weights.copies.record import Copy, Specs
from megagrpo.weights.wire.clock import PhaseTimer
from megagrpo.weights.wire.group import GroupLimits
from megagrpo.weights.wire.moving import Traffic

if TYPE_CHECKING:  # digests are computed where there is no HTTP client, too
    from megagrpo.weights.engines.client import EngineConnection
    from megagrpo.weights.engines.fleet import EngineFleet


@dataclass(frozen=True)
class TrainerWeights:
    """The trainers' side of every transfer. `copies`, `specs` and the settings are the same on
    every rank."""

    mesh: Mesh
    # of the HF tensors: name -> shape and published dtype; values are cast to it before they travel
    specs: Specs
    # by trainer rank: which slice of which HF tensor lies where in its parameters
    copies: list[list[Copy]]
    # this rank's live ones, under the names in `copies`
    parameters: Callable[[], Mapping[str, Tensor]]
    # published, of all tensors but those that the model keeps in another: what config.json says
    dtype: torch.dtype
    bucket_bytes: int  # staged by a rank at most, as far as the transport can choose
    num_engines: int  # that the experiment starts
    folder: Path  # of this run, for what is published through files
    checkpoint: Path  # HF folder whose config.json and tokenizer describe the model
    limits: GroupLimits  # of groups with engines
    delta: bool = False  # send what has changed since the last publish, where the transport can


class Transport(Protocol):
    """Puts the trainers' live weights into the engines' live parameters. Every trainer rank has
    one, for the whole run.

    From the slices of every trainer rank (`TrainerWeights.copies`) and, on rank 0, those that every
    engine rank needs (`EngineConnection.slices`) it decides which rank sends which elements to
    which. It keeps the state of a connection (a process group, a plan) by engine id; without any,
    it leaves `drop` and `leave` out. In the order of a run:

    1. `__init__(weights)`: on every rank, once. May be collective.
    2. A publish connects to the engines of its round and pauses them; new ones report their slices.
    3. `transfer`: on every rank, once per round. Connects to engines it has not met, then moves the
       weights.
    4. The exchange compares digests of the live parameters, without the transport.
    5. `drop`: on rank 0, whenever an engine is gone. If it comes back, it is a new one: 2 and 3 run
       for it again.
    6. `leave`: on rank 0, for every engine that is still there when the run ends.
    """

    # whether it writes live parameters itself, without the model's own load_weights
    past_loader: bool

    def transfer(self, version: int, engines: "EngineFleet", timer: PhaseTimer) -> Traffic:
        """Collective. Moves this moment's weights, called `version`, into all engines of the round.

        `engines.each` runs the HTTP part, one thread per engine; on ranks other than 0 it does
        nothing. An engine that dies raises EngineDown inside `each` and is set aside (`drop`) while
        the others go on; no rank may wait for it longer than `EngineConnection.patience`. Every
        other failure is raised on every rank (Mesh.from_main). If the engine's call needs a
        weight-update session, it is opened and closed here (`EngineConnection.begin`, `end`).
        timer: takes the phases that a transport reports, such as "gather"; the rest counts as
        "transfer". Returns this rank's traffic.
        """

    def drop(self, engine: "EngineConnection") -> None:
        """Drops an engine that died, was drained or restarted, and ends all waits for it.

        On rank 0, in any thread, perhaps twice for one engine; raises nothing. If other ranks have
        connections too, the next `transfer` must inform them.
        """

    def leave(self, engine: "EngineConnection") -> None:
        """Makes a living engine forget the connection. Rank 0; `drop` follows. May raise
        EngineDown, EngineRefused."""
