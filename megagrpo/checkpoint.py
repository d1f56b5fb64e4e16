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

from pydantic import TypeAdapter

from megagrpo import __version__
from megagrpo.mesh import Mesh
from megagrpo.types import TrainState

_PARTIAL = ".partial"


def checkpoint_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def latest(root: Path) -> Path | None:
    """The finished checkpoint of the highest step, or None. Partial folders (an interrupted save) do not count."""
    finished = sorted(p for p in root.glob("step_*") if p.is_dir() and not p.name.endswith(_PARTIAL))
    return finished[-1] if finished else None


def save(root: Path, state: TrainState, identity: dict, keep: int, save_actor: Callable[[Path], None], mesh: Mesh) -> Path:
    """Collective. Write a checkpoint of `state`, then drop the oldest beyond `keep`. Returns its folder.

    A failure on any rank (disk full, say) raises LeaderError on every rank and leaves older checkpoints as they were.
    """
    target = checkpoint_folder(root, state.step)
    partial = target.with_name(target.name + _PARTIAL)

    def on_main(action: Callable[[], None], what: str) -> None:
        error = ""
        if mesh.is_main:
            try:
                action()
            except OSError as exc:
                shutil.rmtree(partial, ignore_errors=True)
                error = f"checkpoint {target}: {what} failed: {exc}"
        mesh.raise_any(error)

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "actor").mkdir(parents=True)

    on_main(prepare, "creating the folder")
    error = ""
    try:
        save_actor(partial / "actor")
    except Exception as exc:  # any rank: the others must not wait for it in the next collective
        free_mib = shutil.disk_usage(root).free >> 20  # torch's writer does not say that the disk is full
        error = f"checkpoint {target}: rank {mesh.rank} could not write, {free_mib} MiB are free there: {type(exc).__name__}: {exc}"
    try:
        mesh.raise_any(error)
    except RuntimeError:
        if mesh.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise

    def finish() -> None:
        _write_json(partial / "state.json", {"train": asdict(state), "identity": identity, "version": __version__})
        _write_json(partial / "manifest.json", _manifest(partial))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        for old in sorted(p for p in root.glob("step_*") if p.is_dir())[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    on_main(finish, "writing the manifest")
    return target


def load(folder: Path, identity: dict, load_actor: Callable[[Path], None], mesh: Mesh) -> TrainState:
    """Collective. Check the folder against its manifest and this run's model, then load it.

    Raises LeaderError (a message naming the file) for a missing, half-written, corrupt or foreign checkpoint.
    """
    error = ""
    if mesh.is_main:
        try:
            check(folder, identity)
        except ValueError as exc:
            error = str(exc)
    mesh.raise_any(error)
    load_actor(folder / "actor")
    return TypeAdapter(TrainState).validate_python(json.loads((folder / "state.json").read_text())["train"])


def check(folder: Path, identity: dict) -> None:
    """ValueError naming what is wrong with a checkpoint folder: missing files, sizes or checksums, another model."""
    manifest_file = folder / "manifest.json"
    if not manifest_file.is_file():
        raise ValueError(f"checkpoint {folder} has no manifest.json: it is not a checkpoint, or its save was interrupted")
    try:
        manifest = json.loads(manifest_file.read_text())
        saved = json.loads((folder / "state.json").read_text())["identity"]
    except (OSError, ValueError, KeyError) as exc:
        raise ValueError(f"checkpoint {folder}: manifest.json or state.json is not readable: {exc}") from exc
    for name, (size, crc) in manifest.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"checkpoint file {file} is missing")
        if file.stat().st_size != size:
            raise ValueError(f"checkpoint file {file} has {file.stat().st_size} bytes, its manifest says {size}")
        if _crc(file) != crc:
            raise ValueError(f"checkpoint file {file} is corrupt: its CRC-32 differs from the manifest")
    different = [f"{key}: checkpoint {saved.get(key)!r}, this run {value!r}" for key, value in identity.items() if saved.get(key) != value]
    if different:
        raise ValueError(f"checkpoint {folder} is of another model: " + "; ".join(different))


def _manifest(folder: Path) -> dict[str, tuple[int, int]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): (p.stat().st_size, _crc(p)) for p in files}


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
