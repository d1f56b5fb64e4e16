"""The layout of the run folder, and atomic writes into it.

config.yaml          the resolved experiment
starts/              step_000012.yaml ...: that of each start, by the step after which it began
metrics.jsonl        also tensorboard/, rollouts/, summary.md, curve.png
checkpoints/         step_000010/ ..., or a link
last_checkpoint      the name of the newest one
unsaved_TIME/        the record of a start that ended before its first checkpoint
dumps/               step_000012/ ...: batches for `megagrpo replay`
weights/             published by transport `disk`
sft/                 metrics of the supervised warm-up
images/              PNG files of the prompts, as engines and trainers see them, named after their
                     content; JSON files say which of them an image of the data became
engine_model/        the model description from which engines start if model.path is quantized, or
                     sparse on a CPU
trained/             samples of every replica as the update saw them
view.html            written by `megagrpo view`
service.json         the address of the rollout service, removed at its end
service.key          its key: readable by its owner
service.progress     a line about its start
wandb/, NAME_id      data for `wandb sync`, and the ids of trackers' runs (log.wandb, log.trackers)
certify/             written by `megagrpo certify`
bisect/              a run folder of `megagrpo bisect`: also report.md, report.json
try/                 a run folder of `megagrpo try`
logs/                of every process: trainer.log, service.log, engine-0.node-0.log ...
  trainer-0.yaml, service.yaml, export_1f2e3d4c.yaml ...    the experiment with which these restart
  trainer.stop_request, .stop_final, .stop_granted, .stop_listens    the stop request of one node
  error_trainer_rank3.txt, .final.txt    why a rank failed; "final": a restart would fail again
  deadline_TIME.txt, ranks/    which rank waits for which, see monitor/watchdog.py; progress, stacks
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

# A text cut inside a pair of surrogates, as JSON from JavaScript may hold one, has no UTF-8; JSON
# reads this escape.
HALF_CHARACTERS = "backslashreplace"
# other names are copies of a user
_ROLLOUTS = re.compile(r"step_(\d+)\.replica_(\d+)\.jsonl")
_TRAINED = re.compile(r"replica_(\d+)\.jsonl")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a draft that becomes `path` when the block ends.

    If an exception leaves the block, the old file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with ExitStack() as cleanup:
        cleanup.callback(draft.unlink, missing_ok=True)
        yield draft
        os.replace(draft, path)


def write_whole(path: Path, text: str) -> None:
    """Writes `path` atomically. An OSError leaves the old file."""
    with whole_file(path) as draft:
        draft.write_text(text, encoding="utf-8", errors=HALF_CHARACTERS)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yields an empty draft folder that replaces `target` when the block ends.

    So `target` is always complete or absent. If an exception leaves the block, the draft is removed
    and the old folder stays. The new files are on disk before they replace `target`.
    """
    target = target.resolve()  # what a link names, on its own disk
    draft, older = (target.with_name(f".{target.name}.{word}") for word in ("partial", "older"))
    _take_back(older, target)  # of a process that was killed between the two renames
    for folder in (draft, older):
        shutil.rmtree(folder, ignore_errors=True)
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        for path in (*draft.iterdir(), draft):
            sync(path)
        cleanup.callback(_take_back, older, target)  # if the new one does not come
        if target.exists():
            target.rename(older)
        draft.rename(target)
        sync(target.parent)
    shutil.rmtree(older, ignore_errors=True)


def _take_back(older: Path, target: Path) -> None:
    if older.exists() and not target.exists():
        older.rename(target)


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    with ExitStack() as cleanup:
        descriptor = os.open(path, os.O_RDONLY)
        cleanup.callback(os.close, descriptor)
        os.fsync(descriptor)


def write_json_lines(path: Path, records: Iterable[dict]) -> None:
    """Writes one JSON object per line, atomically."""
    with whole_file(path) as draft, draft.open("wb") as file:
        file.writelines(json_bytes(record) + b"\n" for record in records)


def json_bytes(value: object, default: Callable[[Any], object] | None = None) -> bytes:
    """Returns a value as JSON. default: converts objects that JSON cannot hold.

    orjson refuses half a character and numbers of more than 64 bits; json, which is ten times as
    slow, writes these.
    """
    with suppress(TypeError):
        return orjson.dumps(value, default, orjson.OPT_PASSTHROUGH_DATACLASS)
    text = json.dumps(value, default=default, ensure_ascii=False)
    return text.encode(errors=HALF_CHARACTERS)


class _Inside:
    """A file or folder of the run folder with a fixed name."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, folder: "RunFolder", owner: object) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The folder `output_dir` of one run; the layout is above."""

    path: Path

    config = _Inside("config.yaml")
    starts = _Inside("starts")
    lock = _Inside(".lock")  # held by the launcher that trains into this folder
    checkpoints = _Inside("checkpoints")
    last_checkpoint = _Inside("last_checkpoint")
    weights = _Inside("weights")
    engine_model = _Inside("engine_model")
    images = _Inside("images")
    metrics = _Inside("metrics.jsonl")
    tensorboard = _Inside("tensorboard")
    rollouts = _Inside("rollouts")
    trained = _Inside("trained")
    view = _Inside("view.html")
    summary = _Inside("summary.md")
    curve = _Inside("curve.png")
    service = _Inside("service.json")
    service_key = _Inside("service.key")
    service_progress = _Inside("service.progress")
    certify = _Inside("certify")
    bisect_report = _Inside("report.json")
    logs = _Inside("logs")
    ranks = _Inside("logs/ranks")

    @property
    def bisect(self) -> "RunFolder":
        """The run folder of `megagrpo bisect`, with its report."""
        return RunFolder(self.path / "bisect")

    @property
    def sft(self) -> "RunFolder":
        """The record of the supervised warm-up: metrics and TensorBoard."""
        return RunFolder(self.path / "sft")

    def dump(self, step: int) -> Path:
        """The batch of finished step `step`, for `megagrpo replay`."""
        return self.path / "dumps" / f"step_{step:06d}"

    def rollout_file(self, step: int, replica: int) -> Path:
        """The samples of finished step `step` by data-parallel rank `replica`."""
        return self.rollouts / f"step_{step:06d}.replica_{replica}.jsonl"

    def rollout_files(self) -> dict[int, dict[int, Path]]:
        """The sample files, by step and data-parallel rank."""
        files: dict[int, dict[int, Path]] = {}
        for path in sorted(self.rollouts.glob("*")):
            if name := _ROLLOUTS.fullmatch(path.name):
                files.setdefault(int(name[1]), {})[int(name[2])] = path
        return files

    def trained_file(self, replica: int) -> Path:
        """Advantages and tokens of the samples that data-parallel rank `replica` trained on."""
        return self.trained / f"replica_{replica}.jsonl"

    def trained_files(self) -> dict[int, Path]:
        """The files of all data-parallel ranks, by rank."""
        names = ((_TRAINED.fullmatch(path.name), path) for path in self.trained.glob("*"))
        return dict(sorted((int(name[1]), path) for name, path in names if name))

    def log(self, name: str) -> Path:
        """The output of child `name`: "service", "trainer", or "trainer-1" on the second node."""
        return self.logs / f"{name}.log"

    def stop_request(self, name: str) -> Path:
        """The stop request for the ranks of `name`."""
        return self.logs / f"{name}.stop_request"

    def error_report(self, name: str, rank: int, final: bool) -> Path:
        """Why rank `rank` of command `name` failed. `final`: a restart would fail again."""
        return self.logs / f"error_{name}_rank{rank}{'.final' * final}.txt"

    def error_reports(self, name: str, final: bool = False) -> list[Path]:
        """The reports of all ranks of the command `name`, on all nodes. final: only those."""
        return list(self.logs.glob(f"error_{name}_rank*{'.final' * final}.txt"))

    def deadline_page(self, moment: str) -> Path:
        """The page of `moment`: which rank waited for which, with all stacks."""
        return self.logs / f"deadline_{moment}.txt"

    def deadline_pages(self) -> set[Path]:
        """All pages of this folder."""
        return set(self.logs.glob("deadline_*.txt"))

    def rank_progress(self, rank: int) -> Path:
        """The progress of rank `rank` in its step."""
        return self.ranks / f"rank_{rank}.json"

    def rank_stacks(self, rank: int) -> Path:
        """The Python stacks of rank `rank`, written on request."""
        return self.ranks / f"rank_{rank}.stacks"

    def stacks_request(self, start: str) -> Path:
        """The request for stacks to all ranks that started at `start`."""
        return self.ranks / f"asked_{start}"
