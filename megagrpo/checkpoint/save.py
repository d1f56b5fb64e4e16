"""Saves and loads checkpoints: atomic, verified, bounded in number, written in the background.

    run/checkpoints/step_000010/   step_000010.partial until every rank has finished
        actor/         Megatron dist_checkpointing
        surplus-*.npz  each leader's groups that the next step consumes first, if any
        ahead-*.npz    each leader's groups already sampled for later steps, if any
        curriculum.npz data.curriculum's record of each row, if any
        state.json     the rest of TrainState, model identity, layout, whether another layout can
                       load the checkpoint, digests of the data's rows, other inputs, version
        manifest.json  size and CRC-32 of every file, written last
    run/checkpoints/hf_000010/     a Hugging Face folder, if checkpoint.hf_every has the step

Loading rejects a folder without a manifest, or with files that differ from it, and names the file.
Another layout rejects a checkpoint for a single layout, and names the remedy.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from pydantic import TypeAdapter

from megagrpo import __version__
from megagrpo.checkpoint.changes import input_problem
from megagrpo.checkpoint.folder import (
    PARTIAL,
    REPLACED,
    Layout,
    checkpoint_folder,
    data_problem,
    description,
    finished_checkpoints,
    is_reshardable,
    layout_problem,
    older_instead,
    restore_replaced,
    step_of,
)
from megagrpo.checkpoint.groups import write_groups
from megagrpo.checkpoint.identity import differences
from megagrpo.config.fields import complaints
from megagrpo.config.schema import CheckpointConfig
from megagrpo.mesh import LeaderError, Mesh
from megagrpo.system.errors import translated
from megagrpo.system.run_folder import RunFolder, sync, write_whole
from megagrpo.types import AlgoState, RowResults, TrainState

if TYPE_CHECKING:  # it pulls in Megatron
    from megagrpo.actor.saving import ActorSave

_WRITER = re.compile(r"/__(\d+)_\d+\.distcp$")  # torch's name of a rank's file
_GROUPS = ("surplus", "ahead")  # fields of TrainState with a file each
_CURRICULUM = "curriculum.npz"
_FIELDS = {field.name for field in fields(TrainState)}
T = TypeVar("T")
SizeAndCrc = tuple[int, int]  # bytes, CRC-32


@dataclass(frozen=True)
class RunIdentity:
    """The model and layout that a checkpoint belongs to."""

    model: dict  # must agree with the run that loads it
    # must agree too if the checkpoint is not reshardable; {}: any will do, for the weights alone
    layout: Layout
    rows: Sequence[Sequence[str | int]] = ()  # of the data; must agree unless it is empty
    inputs: Mapping[str, object] = field(default_factory=dict)  # see changes.py


@dataclass
class Checkpointer:
    """Saves one run on schedule, one save at a time, perhaps in the background.

    Every method is collective over the world and raises LeaderError on every rank if one cannot
    write.
    plan_save: collective; its arguments are an existing empty folder and whether another layout
    must be able to load the checkpoint.
    with_groups: returns the state with the groups of this rank, if it is a leader.
    export: collective; writes the live weights as a Hugging Face folder, complete or not at all.
    background: training continues during a save, so plan_save must copy.
    """

    options: CheckpointConfig
    root: Path
    identity: RunIdentity
    plan_save: "Callable[[Path, bool], ActorSave]"
    with_groups: Callable[[TrainState], TrainState]
    mesh: Mesh
    num_steps: int  # of the run
    saved_step: int  # the last of which a save began; at first that of the start
    background: bool
    export: Callable[[Path], None]
    reference_step: Callable[[int], int] = lambda step: 0  # AlgorithmConfig.moved_reference
    _pending: "PendingSave | None" = None  # being written while training continues

    def on_schedule(self, state: TrainState, stops: bool = False) -> bool:
        """Collective. Saves after every options.every steps and after the last, some of them also as
        a Hugging Face folder, unless the run stops; completes a save whose files are written. Returns
        whether the weights of now become the reference."""
        if self._pending is not None and self._pending.ready():
            self.complete()
        last = state.step == self.num_steps
        every = self.options.every
        was_saved = self.saved_step == state.step
        moves = 0 < state.step == self.reference_step(state.step)
        if (every and state.step % every == 0) or moves or last:
            self._save(state, last)
        between = every * self.options.hf_every
        exports = last or (between and state.step % between == 0 and not stops)
        if exports or not self.background:
            self.complete()
        if exports:
            self._export(state.step, was_saved)
        return moves

    def _export(self, step: int, was_saved: bool) -> None:
        """Collective. Writes the step's Hugging Face folder, unless an earlier start has, and
        removes the oldest ones. was_saved: by an earlier start."""
        if not (self.options.hf_every and step):
            return
        folder = checkpoint_folder(self.root, step, "hf")

        def is_written() -> bool:
            # an older one is of a start that continued from a checkpoint that is gone: the step's own
            # comes after its checkpoint is complete
            saved = checkpoint_folder(self.root, step).stat().st_mtime
            return folder.is_dir() and folder.stat().st_mtime >= saved

        def remove_oldest() -> None:
            exports = [p for p in finished_checkpoints(self.root, "hf") if step_of(p) <= step]
            for path in exports[: -self.options.keep]:
                shutil.rmtree(path, ignore_errors=True)

        if not (was_saved and self.mesh.from_main(is_written, f"look for {folder}")):
            self.export(folder)
            self.mesh.from_main(remove_oldest, f"remove folders older than {folder}")

    def save_now(self, state: TrainState) -> None:
        """Collective. Saves `state`, the last of this start, unless it is saved already. Returns
        when it is written."""
        self._save(state, last=True)
        self.complete()

    def _save(self, state: TrainState, last: bool) -> None:
        choice = self.options.reshardable
        reshardable = choice == "always" or (choice == "last" and last)
        if self.saved_step == state.step and not (
            reshardable and self._saved_for_one_layout(state.step)
        ):
            return
        self.complete()  # one at a time, because a pending save holds a copy of all state
        state = self.with_groups(state)
        self.saved_step = state.step  # even if it fails, so that the error does not come twice
        self._pending = PendingSave(
            self.root,
            state,
            self.identity,
            self.options,
            lambda folder: self.plan_save(folder, reshardable),
            self.mesh,
            self.reference_step,
        )

    def _saved_for_one_layout(self, step: int) -> bool:
        """Collective. Returns whether other layouts cannot load a step's finished checkpoint."""
        self.complete()
        folder = checkpoint_folder(self.root, step)
        return self.mesh.from_main(
            lambda: folder.is_dir() and not is_reshardable(folder), f"checkpoint {folder}"
        )

    def complete(self) -> None:
        """Collective. Waits for the save that is being written, if any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()


class PendingSave:
    """Writes `state` in a thread of every rank. `finish` makes it a checkpoint, or nothing is left.

    Collective: construction and all methods. plan_save: collective; its argument is an existing
    empty folder. options, reference_step: which older checkpoints stay. Training may continue before `finish` if
    plan_save took a copy. A failure on any rank, such as a full disk, here or in `finish` raises
    LeaderError on every rank and leaves older checkpoints as they were.
    """

    def __init__(
        self,
        root: Path,
        state: TrainState,
        identity: RunIdentity,
        options: CheckpointConfig,
        plan_save: "Callable[[Path], ActorSave]",
        mesh: Mesh,
        reference_step: Callable[[int], int] = lambda step: 0,
    ):
        self.target = checkpoint_folder(root, state.step)
        self.partial = self.target.with_name(self.target.name + PARTIAL)
        # of this leader: all leaders' may be gigabytes
        self._groups = {name: list(getattr(state, name)) for name in _GROUPS if mesh.is_leader}
        self._curriculum = state.curriculum
        self._description = {
            "train": asdict(replace(state, surplus=[], ahead=[], curriculum=None)),
            "identity": identity.model,
            "layout": dict(identity.layout),
            "rows": list(identity.rows),
            "inputs": dict(identity.inputs),
            "version": __version__,
        }
        self._options = options
        self._reference_step = reference_step
        self._mesh = mesh
        # this rank's files, for the manifest
        self._written: Future[dict[str, SizeAndCrc]] = Future()
        with self._all_or_nothing():
            mesh.from_main(self._make_folder, f"checkpoint {self.target}")
            self._plan = self._everywhere(lambda: plan_save(self.partial / "actor"))
        # a daemon, so that a run that fails does not wait; `finish` raises an exception in it on
        # every rank
        Thread(
            target=_attempt, args=(self._write, self._written), name="checkpoint", daemon=True
        ).start()

    def ready(self) -> bool:
        """Collective. Returns whether all ranks have written, so that `finish` does not wait."""
        return self._mesh.all_true(self._written.done())

    def finish(self) -> Path:
        """Collective. Waits for the files, renames the folder to a checkpoint and removes the oldest
        ones. Returns the checkpoint."""
        with self._all_or_nothing():
            written = self._everywhere(self._written.result)
            self._everywhere(self._plan.finish)
            entries = {
                name: entry
                for part in self._mesh.gather_world(written)
                for name, entry in part.items()
            }
            self._mesh.from_main(lambda: self._publish(entries), f"checkpoint {self.target}")
        return self.target

    def _make_folder(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)
        (self.partial / "actor").mkdir(parents=True)

    def _write(self) -> dict[str, SizeAndCrc]:
        written = dict(self._plan.write())
        for name, groups in self._groups.items():
            if groups:
                path = self.partial / f"{name}-{self._mesh.dp_rank:05}.npz"
                write_groups(path, groups)
                written[path] = (path.stat().st_size, _crc(path))
        return {self._name(path): entry for path, entry in written.items()}

    def _publish(self, written: dict[str, SizeAndCrc]) -> None:
        if self._curriculum is not None:
            np.savez(self.partial / _CURRICULUM, **vars(self._curriculum))
        described = self._description | {"reshardable": self._plan.reshardable}
        (self.partial / "state.json").write_text(json.dumps(described, indent=1))
        rest = sorted(
            p for p in self.partial.rglob("*") if p.is_file() and self._name(p) not in written
        )
        entries = written | {self._name(path): (path.stat().st_size, _crc(path)) for path in rest}
        manifest = self.partial / "manifest.json"
        manifest.write_text(json.dumps(entries, indent=1))
        # Megatron syncs tensors only; older checkpoints are removed below
        for path in (*rest, manifest, self.partial / "actor", self.partial):
            sync(path)
        if self.target.exists():  # removing it would take longer, with no checkpoint meanwhile
            os.replace(self.target, self.target.with_name(self.target.name + REPLACED))
        with ExitStack() as stack:
            stack.callback(restore_replaced, self.target.parent)  # if the rename fails
            os.replace(self.partial, self.target)
        sync(self.target.parent)
        # before older ones are removed, so that a start always finds the recorded checkpoint
        write_whole(RunFolder(self.target.parent.parent).last_checkpoint, self.target.name)
        interrupted = self.target.parent.glob(f"step_*{PARTIAL}")
        for folder in [*self._superfluous(), *interrupted]:
            shutil.rmtree(folder, ignore_errors=True)

    def _superfluous(self) -> list[Path]:
        """Returns the older checkpoints to remove, but for references of those that stay."""
        finished = finished_checkpoints(self.target.parent)
        older = finished[: finished.index(self.target)]
        count = max(len(finished) - self._options.keep, 0)
        needed = {self._reference_step(step_of(folder)) for folder in finished[count:]}
        return [folder for folder in older[:count] if step_of(folder) not in needed]

    def _everywhere(self, action: Callable[[], T]) -> T:
        """Collective. Runs `action` on every rank. A failure on one raises LeaderError on all."""
        done = _attempt(action, Future())
        error = ""
        if exc := done.exception():
            free = ""
            with suppress(OSError):  # of a file system that is gone
                # torch's writer does not report a full disk
                free = f", {shutil.disk_usage(self.target.parent).free >> 20} MiB are free there"
            error = (
                f"checkpoint {self.target}: rank {self._mesh.rank} could not write{free}: "
                f"{type(exc).__name__}: {exc}"
            )
        self._mesh.raise_any(error)
        return done.result()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Removes the folder if a rank failed, which all ranks know."""
        try:
            yield
        except LeaderError:
            if self._mesh.is_main:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.partial))


def _attempt(action: Callable[[], T], done: "Future[T]") -> "Future[T]":
    """Runs `action` and returns `done`, which then has its result or its exception."""
    try:
        done.set_result(action())
    except Exception as exc:
        done.set_exception(exc)
    return done


def load(
    folder: Path, identity: RunIdentity, load_actor: Callable[[Path], None], mesh: Mesh
) -> TrainState:
    """Collective. Checks the folder against its manifest and this run's model and layout, then
    loads it, but for its groups: see saved_groups.

    Raises LeaderError, naming the file, for a missing, half-written, corrupt or foreign checkpoint,
    and for one that only another layout can load.
    """
    mesh.raise_any("\n".join(complaints(check, folder, identity, mesh)))
    load_actor(folder / "actor")
    saved = description(folder)["train"]
    state = {name: value for name, value in saved.items() if name in _FIELDS}
    algo_state = TypeAdapter(AlgoState).validate_python(state.pop("algo_state"))
    if (file := folder / _CURRICULUM).exists():
        with np.load(file) as arrays:
            state["curriculum"] = RowResults(**arrays)
    return TrainState(**state, algo_state=algo_state)


def check(folder: Path, identity: RunIdentity, mesh: Mesh) -> None:
    """Raises ValueError naming the fault of a checkpoint: another model or layout, files, sizes,
    checksums.

    Ranks divide the files, because a single rank would read a large model's terabytes for an hour.
    Each rank checks the files that the same rank wrote. If the layout is the same, it then loads
    them from its node's page cache.
    """
    instead = older_instead(folder)
    if not (folder / "manifest.json").is_file():
        raise ValueError(
            f"checkpoint {folder} has no manifest.json: it is not a "
            f"checkpoint, or its save was interrupted{instead}"
        )
    unreadable = f"checkpoint {folder}: manifest.json or state.json is not readable{instead}"
    with translated(unreadable, OSError, ValueError, KeyError):
        manifest = json.loads((folder / "manifest.json").read_text())
        described = description(folder)
        model = described["identity"]
        saved = described["train"]
    if lost := [name for name, value in saved.items() if value and name not in _FIELDS]:
        raise ValueError(
            f"checkpoint {folder} has {', '.join(lost)} of a setting that is gone: continue it with "
            f"megagrpo {described['version']}, or take a checkpoint without"
        )
    if different := differences(model, identity.model):
        raise ValueError(f"checkpoint {folder} is of another model: {'; '.join(different)}")
    problem = (
        layout_problem(folder, identity.layout)
        or data_problem(folder, identity.rows)
        or input_problem(folder, identity.inputs)
    )
    if problem:
        raise ValueError(problem)
    for index, (name, (size, crc)) in enumerate(sorted(manifest.items())):
        if writer := _WRITER.search(name):
            index = int(writer[1])
        if index % mesh.world_size != mesh.rank:
            continue
        file = folder / name
        if not file.is_file():
            raise ValueError(f"checkpoint file {file} is missing{instead}")
        if file.stat().st_size != size:
            raise ValueError(
                f"checkpoint file {file} has {file.stat().st_size} bytes, its manifest says {size}"
                f"{instead}"
            )
        with translated(f"checkpoint file {file} cannot be read{instead}", OSError):
            if _crc(file) != crc:
                raise ValueError(
                    f"checkpoint file {file} is corrupt: its CRC-32 differs from the manifest{instead}"
                )


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc
