"""Checkpoint folders: atomic, checked before use, bounded in number. What is inside them is the actor's and TrainState's.

    run/checkpoints/step_000010/   written as step_000010.partial, renamed when every rank has finished
        actor/         Megatron dist_checkpointing
        state.json     TrainState, model identity, layout, versions
        manifest.json  size and CRC-32 of every file, written last

A folder without a manifest, or whose files differ from it, is refused with the file's name.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from threading import Thread

from pydantic import TypeAdapter

from megagrpo import __version__
from megagrpo.mesh import Mesh
from megagrpo.types import TrainState

_PARTIAL = ".partial"
# Given the folder, returns how this rank's files are written (alone, in a thread; their paths) and the collective end of it;
# or None when everything is there already.
SaveActor = Callable[[Path], tuple[Callable[[], list[Path]], Callable[[], None]] | None]


def checkpoint_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def latest(root: Path, at_most: int | None = None) -> Path | None:
    """The finished checkpoint of the highest step (up to `at_most`), or None. Partial folders (an interrupted save) do not count."""
    found = _finished(root)
    if at_most is not None:
        found = [p for p in found if p <= checkpoint_folder(root, at_most)]
    return found[-1] if found else None


def _finished(root: Path) -> list[Path]:
    return sorted(p for p in root.glob("step_*") if p.is_dir() and not p.name.endswith(_PARTIAL))


def save(root: Path, state: TrainState, identity: dict, keep: int, save_actor: SaveActor, mesh: Mesh) -> Path:
    """Collective. Write a checkpoint of `state`, then drop the oldest beyond `keep`. Returns its folder.

    A failure on any rank (disk full, say) raises LeaderError on every rank and leaves older checkpoints as they were.
    """
    return begin(root, state, identity, keep, save_actor, mesh).finish()


def begin(root: Path, state: TrainState, identity: dict, keep: int, save_actor: SaveActor, mesh: Mesh) -> "PendingSave":
    """Collective. Start what `save` does; files are written by a thread of every rank until `PendingSave.finish`.

    Training may go on meanwhile if save_actor took a copy. LeaderError as from `save`, for what fails before the writing.
    """
    pending = PendingSave(root, state, identity, keep, mesh)

    def prepare() -> None:
        shutil.rmtree(pending.partial, ignore_errors=True)
        (pending.partial / "actor").mkdir(parents=True)

    pending.on_main(prepare, "creating the folder")
    parts, failure = None, None
    try:
        parts = save_actor(pending.partial / "actor")
    except Exception as exc:  # any rank: the others must not wait for it in the next collective
        failure = exc
    pending.all_or_none(failure)
    if parts is not None:
        pending.write_in_background(*parts)
    return pending


class PendingSave:
    """A save in progress, held by every rank. It becomes a checkpoint in `finish`, or leaves nothing behind."""

    def __init__(self, root: Path, state: TrainState, identity: dict, keep: int, mesh: Mesh):
        self.target = checkpoint_folder(root, state.step)
        self.partial = self.target.with_name(self.target.name + _PARTIAL)
        self._description = {"train": asdict(state), "identity": identity, "version": __version__}
        self._keep, self._mesh = keep, mesh
        self._thread: Thread | None = None
        self._finish_actor: Callable[[], None] = lambda: None
        self._failure: Exception | None = None
        self._written: dict[str, tuple[int, int]] = {}  # this rank's files, for the manifest

    def write_in_background(self, write: Callable[[], list[Path]], finish: Callable[[], None]) -> None:
        def work() -> None:
            try:
                self._written = {self._name(path): _size_and_crc(path) for path in write()}
            except Exception as exc:  # raised in `finish`, on every rank
                self._failure = exc

        self._finish_actor = finish
        self._thread = Thread(target=work, name="checkpoint", daemon=True)  # a run that fails does not wait for it
        self._thread.start()

    def ready(self) -> bool:
        """Whether all ranks have written their files, so that `finish` will not wait. Collective."""
        return self._mesh.all_true(self._thread is None or not self._thread.is_alive())

    def finish(self) -> Path:
        """Wait for the files, then name the folder a checkpoint. Collective; LeaderError on every rank as from `save`."""
        if self._thread is not None:
            self._thread.join()
        self.all_or_none(self._failure)
        try:
            self._finish_actor()
        except Exception as exc:
            self._failure = exc
        self.all_or_none(self._failure)
        written = {name: entry for part in self._mesh.gather_world(self._written) for name, entry in part.items()}

        def publish() -> None:
            _write_json(self.partial / "state.json", self._description)
            rest = sorted(p for p in self.partial.rglob("*") if p.is_file() and self._name(p) not in written)
            _write_json(
                self.partial / "manifest.json", written | {self._name(path): _size_and_crc(path) for path in rest}
            )
            shutil.rmtree(self.target, ignore_errors=True)
            os.replace(self.partial, self.target)
            finished = _finished(self.target.parent)
            older = [p for p in finished if p < self.target]  # whatever else lies here, this one is not what makes room
            interrupted = self.target.parent.glob(f"step_*{_PARTIAL}")
            for folder in [*older[: max(len(finished) - self._keep, 0)], *interrupted]:
                shutil.rmtree(folder, ignore_errors=True)

        self.on_main(publish, "writing the manifest")
        return self.target

    def on_main(self, action: Callable[[], None], what: str) -> None:
        """The main rank does it; LeaderError on every rank when it cannot."""
        error = ""
        if self._mesh.is_main:
            try:
                action()
            except OSError as exc:
                shutil.rmtree(self.partial, ignore_errors=True)
                error = f"checkpoint {self.target}: {what} failed: {exc}"
        self._mesh.raise_any(error)

    def all_or_none(self, failure: Exception | None) -> None:
        """Collective: if any rank failed, remove the folder and raise LeaderError on every rank."""
        error = ""
        if failure is not None:
            free_mib = (
                shutil.disk_usage(self.target.parent).free >> 20
            )  # torch's writer does not say that the disk is full
            error = (
                f"checkpoint {self.target}: rank {self._mesh.rank} could not write, {free_mib} MiB are free there: "
                f"{type(failure).__name__}: {failure}"
            )
        try:
            self._mesh.raise_any(error)
        except RuntimeError:
            if self._mesh.is_main:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.partial))


def load(folder: Path, identity: dict, load_actor: Callable[[Path], None], mesh: Mesh) -> TrainState:
    """Collective. Check the folder against its manifest and this run's model, then load it.

    Raises LeaderError (a message naming the file) for a missing, half-written, corrupt or foreign checkpoint.
    """
    error = ""
    try:
        check(folder, identity, mesh)
    except ValueError as exc:
        error = str(exc)
    mesh.raise_any(error)
    load_actor(folder / "actor")
    return TypeAdapter(TrainState).validate_python(json.loads((folder / "state.json").read_text())["train"])


def check(folder: Path, identity: dict, mesh: Mesh) -> None:
    """ValueError naming what is wrong with a checkpoint folder: missing files, sizes or checksums, another model.

    The files are shared out over the ranks: one alone would read the terabytes of a large model for an hour.
    """
    manifest_file = folder / "manifest.json"
    if not manifest_file.is_file():
        raise ValueError(
            f"checkpoint {folder} has no manifest.json: it is not a checkpoint, or its save was interrupted"
        )
    try:
        manifest = json.loads(manifest_file.read_text())
        saved = json.loads((folder / "state.json").read_text())["identity"]
    except (OSError, ValueError, KeyError) as exc:
        raise ValueError(f"checkpoint {folder}: manifest.json or state.json is not readable: {exc}") from exc
    for name, (size, crc) in sorted(manifest.items())[mesh.rank :: mesh.world_size]:
        file = folder / name
        if not file.is_file():
            raise ValueError(f"checkpoint file {file} is missing")
        if file.stat().st_size != size:
            raise ValueError(f"checkpoint file {file} has {file.stat().st_size} bytes, its manifest says {size}")
        if _crc(file) != crc:
            raise ValueError(f"checkpoint file {file} is corrupt: its CRC-32 differs from the manifest")
    different = [
        f"{key}: checkpoint {saved.get(key)!r}, this run {value!r}"
        for key, value in identity.items()
        if saved.get(key) != value
    ]
    if different:
        raise ValueError(f"checkpoint {folder} is of another model: " + "; ".join(different))


def _size_and_crc(path: Path) -> tuple[int, int]:
    return path.stat().st_size, _crc(path)


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def _write_json(path: Path, value: dict) -> None:
    with path.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
