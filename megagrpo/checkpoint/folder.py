"""Lists the checkpoints in a folder without loading them.

step_000010/   finished: state.json describes it, manifest.json lists the files
step_000020.partial/   being written, or interrupted
step_000010.replaced.partial/   an earlier save of the same step, during a rename
hf_000010/      a Hugging Face folder of checkpoint.hf_every
anything else   the user's; it is never touched
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from megagrpo.system.run_folder import RunFolder, write_whole

PARTIAL = ".partial"
REPLACED = f".replaced{PARTIAL}"
OTHER_DATA = "other_data"  # a value of checkpoint.resume
_NAME = re.compile(r"(step|hf)_(\d+)")
Layout = Mapping[str, int | None]  # ActorConfig.layout


def checkpoint_folder(root: Path, step: int, kind: str = "step") -> Path:
    """The checkpoint of the state after `step` steps; of kind "hf" the Hugging Face folder."""
    return root / f"{kind}_{step:06d}"


def latest(root: Path, at_most: int | None = None) -> Path | None:
    """Returns the finished checkpoint of the highest step (up to `at_most`), or None. Interrupted
    saves do not count."""
    newest_first = reversed(finished_checkpoints(root))
    return next((p for p in newest_first if at_most is None or step_of(p) <= at_most), None)


def finished_checkpoints(root: Path, kind: str = "step") -> list[Path]:
    """Returns the finished checkpoints, or of kind "hf" the Hugging Face folders, the lowest step
    first."""
    folders = (p for p in root.glob(f"{kind}_*") if _NAME.fullmatch(p.name) and p.is_dir())
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """Returns the step after which such a folder was saved."""
    return int(folder.name.rpartition("_")[2])


def restore_replaced(root: Path) -> None:
    """Renames the checkpoints back that were about to be replaced when their run was killed."""
    for folder in root.glob(f"step_*{REPLACED}"):
        target = folder.with_name(folder.name.removesuffix(REPLACED))
        if not target.exists():
            os.replace(folder, target)


def place_problem(root: Path, directory: str | None) -> str:
    """Returns why a run folder's checkpoints cannot be in `checkpoint.dir`, or that the newest one
    is lost; "" if neither."""
    run = RunFolder(root.parent)
    saved = run.last_checkpoint
    place = root
    if directory is not None and not os.path.lexists(root):
        # a user who moved the checkpoints, as the message below says, has no link yet
        place = Path(directory)
    name = saved.read_text() if saved.exists() else ""
    # perhaps with a user's suffix, or for restore_replaced; an interrupted save does not count
    if name and not any(p.name != name + PARTIAL for p in place.glob(f"{name}*")):
        return (
            f"output_dir {run.path} has the record of {max(run.rollout_files(), default=0)} steps, but "
            f"{name}, the checkpoint that was saved last, is not in {place.resolve()}. "
            "Put it back or correct checkpoint.dir; to begin anew, name another output_dir; if it is "
            f"lost, remove {saved}, and the run goes on from {latest(place) or 'step 0'}"
        )
    if directory is None or (root.is_symlink() and root.resolve() == Path(directory).resolve()):
        return ""
    if place == root:
        return (
            f"checkpoint.dir: {directory}, but this run's checkpoints are in {root.resolve()}: move "
            f"them there and remove {root}, or remove checkpoint.dir"
        )
    # another run wrote a folder with another newest checkpoint
    newest = latest(place)
    if newest is not None and newest.name != name:
        return (
            f"checkpoint.dir: {directory} has another run's {newest.name}; name an empty folder, "
            f"or start from it by checkpoint.load: {newest}"
        )
    return ""


def put_in_place(root: Path, directory: str | None) -> Path | None:
    """Links a run folder's checkpoints to `checkpoint.dir`. Returns the newest one, and records its
    name, which older versions did not. Raises ValueError with place_problem."""
    if problem := place_problem(root, directory):
        raise ValueError(problem)
    if directory is not None:
        target = Path(directory).resolve()
        target.mkdir(parents=True, exist_ok=True)
        if not root.is_symlink():
            root.parent.mkdir(parents=True, exist_ok=True)
            root.symlink_to(target)
    restore_replaced(root)
    if newest := latest(root):
        write_whole(RunFolder(root.parent).last_checkpoint, newest.name)
    return newest


def description(folder: Path) -> dict:
    """Returns what a finished checkpoint's state.json says of it. Raises OSError, ValueError."""
    return json.loads((folder / "state.json").read_text())


def is_reshardable(folder: Path) -> bool:
    """Returns whether any layout can load a finished checkpoint. One without a record is so."""
    return bool(description(folder).get("reshardable", True))


def layout_problem(folder: Path, layout: Layout) -> str:
    """Returns why a run with this layout cannot load a finished checkpoint, and what to do; "" if it
    can. {}: the weights alone are loaded."""
    saved = description(folder).get("layout", layout)
    if not layout or is_reshardable(folder) or saved == layout:
        return ""
    return (
        f"checkpoint {folder} can be loaded by its own layout alone ({_in_words(saved)}), this "
        f"run has another ({_in_words(layout)}). Start it once more under its own layout and ask it "
        "to stop (SIGUSR1 to the launcher), with checkpoint.reshardable last or always: it then "
        f"saves in the form that any layout loads{older_instead(folder, is_reshardable)}"
    )


def older_instead(folder: Path, fits: Callable[[Path], bool] = Path.is_dir) -> str:
    """Returns how a run continues from the newest older checkpoint that fits, as the end of a
    message; "" if there is none, or if a user has named the folder."""
    if not _NAME.fullmatch(folder.name):
        return ""
    older = [
        p.name
        for p in finished_checkpoints(folder.parent)
        if step_of(p) < step_of(folder) and (p / "manifest.json").is_file() and fits(p)
    ]
    if not older:
        return ""
    return f"; or rename it to {folder.name}.old: {older[-1]} beside it can be loaded"


def data_problem(folder: Path, rows: Sequence[Sequence[str | int]]) -> str:
    """Returns why the data cursor of a finished checkpoint does not fit these rows, and what to do;
    "" if it fits.

    rows: [name, number, digest] of the rows of each file, in order; [] is not compared, nor is a
    checkpoint without this record. A moved or renamed file is the same file.
    """
    saved = description(folder).get("rows") or rows
    pairs = zip_longest(saved, rows, fillvalue=("no file", 0, ""))
    different = [(then, now) for then, now in pairs if then[1:] != now[1:]]
    if not (rows and different):
        return ""
    (name, then, _), (now_name, now, _) = different[0]
    change = f"{then} rows in use then ({name}), {now} now ({now_name})"
    if then == now:
        change += ", some of them others or elsewhere"
    return (
        f"checkpoint {folder} counts its prompts in other data: {change}. Rows would be taken twice, "
        "others never. Put the data and the keys that choose rows (data.limit, "
        f"data.max_prompt_tokens) back, or go on with checkpoint.resume: {OTHER_DATA}"
    )


def _in_words(layout: Layout) -> str:
    """Returns the ranks of a layout, and each size that is not 1."""
    return ", ".join(
        f"{name} {size}"
        for name, size in layout.items()
        if name == "ranks" or size not in (None, 1)
    )
