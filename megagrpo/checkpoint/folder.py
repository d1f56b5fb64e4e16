"""Lists the checkpoints in a folder without loading them: finished ones, their form and bytes.

step_000010/   finished: described by state.json, its files by manifest.json
step_000020.partial/   being written, or interrupted
step_000010.replaced.partial/   its form before it was saved again, for the moment of a rename
anything else   a user's, left alone
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from megagrpo.system.run_folder import RunFolder, write_whole

PARTIAL = ".partial"
REPLACED = f".replaced{PARTIAL}"
OTHER_DATA = "other_data"  # of checkpoint.resume
_NAME = re.compile(r"step_(\d+)")
Layout = Mapping[str, int | None]  # ActorConfig.layout


def checkpoint_folder(root: Path, step: int) -> Path:
    """The checkpoint of the state after `step` steps."""
    return root / f"step_{step:06d}"


def latest(root: Path, at_most: int | None = None) -> Path | None:
    """Returns the finished checkpoint of the highest step (up to `at_most`), or None; interrupted
    saves are ignored."""
    found = [p for p in finished_checkpoints(root) if at_most is None or step_of(p) <= at_most]
    return found[-1] if found else None


def finished_checkpoints(root: Path) -> list[Path]:
    """Returns the finished checkpoints, the lowest step first."""
    found = [p for p in root.glob("step_*") if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """Returns the steps after which a finished checkpoint was saved."""
    return int(folder.name.removeprefix("step_"))


def restore_replaced(root: Path) -> None:
    """Takes back the checkpoints that were about to be replaced when their start was killed."""
    for kept in root.glob(f"step_*{REPLACED}"):
        target = kept.with_name(kept.name.removesuffix(REPLACED))
        if not target.exists():
            os.replace(kept, target)


def place_problem(root: Path, directory: str | None) -> str:
    """Returns why the checkpoints of a run folder cannot be in `checkpoint.dir`, or that the newest
    one is lost; "" if neither."""
    run = RunFolder(root.parent)
    saved = run.last_checkpoint
    # checkpoints that were moved, as is said below, are in the folder that has no link yet
    place = root if directory is None or os.path.lexists(root) else Path(directory)
    name = saved.read_text() if saved.exists() else ""
    # perhaps with a user's suffix, or for restore_replaced; an interrupted save is none
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
    # a folder whose newest one is another was written by another run
    if (found := finished_checkpoints(place)) and found[-1].name != name:
        return (
            f"checkpoint.dir: {directory} has another run's {found[-1].name}; name an empty folder, "
            f"or start from it by checkpoint.load: {found[-1]}"
        )
    return ""


def put_in_place(root: Path, directory: str | None) -> Path | None:
    """Makes the checkpoints of a run folder a link to `checkpoint.dir`. Returns the newest one, and
    records its name, which an older version did not. Raises ValueError as place_problem says."""
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


def is_reshardable(folder: Path) -> bool:
    """Returns whether any layout can load a finished checkpoint. All were before this was
    recorded."""
    return bool(json.loads((folder / "state.json").read_text()).get("reshardable", True))


def layout_problem(folder: Path, own: Layout) -> str:
    """Returns why a run of the layout `own` cannot load a finished checkpoint, and what to do; ""
    if it can."""
    saved = json.loads((folder / "state.json").read_text()).get("layout", own)
    if is_reshardable(folder) or saved == own:
        return ""
    older = [
        p.name
        for p in finished_checkpoints(folder.parent)
        if step_of(p) < step_of(folder) and (p / "manifest.json").is_file() and is_reshardable(p)
    ]
    there = (
        f"; or rename it to {folder.name}.old: {older[-1]} beside it can be loaded" if older else ""
    )
    return (
        f"checkpoint {folder} can be loaded by its own layout alone ({_in_words(saved)}), this "
        f"run has another ({_in_words(own)}). Start it once more under its own layout and ask it "
        "to stop (SIGUSR1 to the launcher), with checkpoint.reshardable last or always: it then "
        f"saves in the form that any layout loads{there}"
    )


def data_problem(folder: Path, own: Sequence[Sequence[str | int]]) -> str:
    """Returns why the data cursor of a finished checkpoint does not count in the rows `own`, and
    what to do; "" if it does.

    own: [name, number, digest] of the rows of each file, in order; [] is not compared, nor is a
    checkpoint from before they were recorded. A moved or renamed file is the same file.
    """
    saved = json.loads((folder / "state.json").read_text()).get("rows") or own
    pairs = zip_longest(saved, own, fillvalue=("no file", 0, ""))
    found = [(then, now) for then, now in pairs if then[1:] != now[1:]] if own else []
    if not found:
        return ""
    (name, then, _), (now_name, now, _) = found[0]
    what = f"{then} rows in use then ({name}), {now} now ({now_name})"
    if then == now:
        what += ", some of them others or elsewhere"
    return (
        f"checkpoint {folder} counts its prompts in other data: {what}. Rows would be taken twice, "
        "others never. Put the data and the keys that choose rows (data.limit, "
        f"data.max_prompt_tokens) back, or go on with checkpoint.resume: {OTHER_DATA}"
    )


def _in_words(layout: Layout) -> str:
    """Names a layout: the ranks, and each size that is not 1."""
    return ", ".join(
        f"{name} {size}"
        for name, size in layout.items()
        if name == "ranks" or size not in (None, 1)
    )
