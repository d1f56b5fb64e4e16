"""What lies where in a run folder, and how a file gets there: whole, or not at all.

config.yaml     the resolved experiment          metrics.jsonl  tensorboard/  rollouts/  summary.md  curve.png
checkpoints/    step_000010/ ...                 dumps/         step_000012/ ...: batches for `megagrpo replay`
weights/        what transport `disk` publishes  logs/          of every process; ranks/, deadline_*.txt, error_*.txt
service.json    where the rollout service is     service.key    its key: readable by its owner, gone when it ends
"""

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a draft beside `path` and renames it, so that no reader ever sees half of it. OSError leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def write_json_lines(path: Path, records: Iterable[dict]) -> None:
    """Writes one JSON object a line, the whole file or nothing."""
    write_whole(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


@dataclass(frozen=True)
class RunFolder:
    """The folder `output_dir` of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def summary(self) -> Path:
        return self.path / "summary.md"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def service(self) -> Path:
        return self.path / "service.json"

    @property
    def service_key(self) -> Path:
        return self.path / "service.key"

    @property
    def sft(self) -> "RunFolder":
        """The record of the supervised warm-up: metrics and TensorBoard."""
        return RunFolder(self.path / "sft")

    def dump(self, step: int) -> Path:
        """The batch of finished step `step`, for `megagrpo replay`."""
        return self.path / "dumps" / f"step_{step:06d}"

    def rollout_file(self, step: int) -> Path:
        return self.rollouts / f"step_{step:06d}.jsonl"
