"""The run folder: what lies where in it, and how a file gets there, whole or not at all.

config.yaml     the resolved experiment          metrics.jsonl  tensorboard/  rollouts/  summary.md  curve.png
checkpoints/    step_000010/ ...                 dumps/         step_000012/ ...: batches for `megagrpo replay`
weights/        what transport `disk` publishes  sft/           metrics of the supervised warm-up
engine_model/   what engines start from where model.path is quantised: its description in bfloat16
timeline/       who did what when, of every rank trained/       samples as the update saw them, of every replica
view.html  trace.json.gz                         what `megagrpo view` writes
service.json    where the rollout service is     service.key    its key: readable by its owner, gone when it ends
wandb/          what `wandb sync` sends          wandb_id       of the W&B run that this one is (log.wandb)
certify/        what `megagrpo certify` writes   logs/          of every process
bisect/         what `megagrpo bisect` writes: report.md, report.json; a run folder of its own
logs/trainer.log, service.log, engine-0.node-0.log ...
logs/trainer.stop_request                        asks the ranks of one node to stop, see stop_request.py
logs/error_trainer_rank3.txt, .final.txt         why a rank failed; "final": the same would happen again
logs/deadline_TIME.txt, logs/ranks/              who waits for whom, see monitor/watchdog.py
"""

import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a draft beside `path` and renames it: no reader ever sees half of it. OSError leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
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
        """The resolved experiment, as the children read it."""
        return self.path / "config.yaml"

    @property
    def lock(self) -> Path:
        """Held by the launcher that trains into this folder."""
        return self.path / ".lock"

    @property
    def checkpoints(self) -> Path:
        """The root of all checkpoints."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """What transport `disk` publishes."""
        return self.path / "weights"

    @property
    def engine_model(self) -> Path:
        """What engines start from where model.path is quantised: its description without that, and no weights."""
        return self.path / "engine_model"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The metrics as TensorBoard reads them."""
        return self.path / "tensorboard"

    @property
    def wandb_id(self) -> Path:
        """The id of the W&B run that this run is, over all its starts."""
        return self.path / "wandb_id"

    @property
    def rollouts(self) -> Path:
        """The samples of every step."""
        return self.path / "rollouts"

    @property
    def view(self) -> Path:
        """The page of `megagrpo view`."""
        return self.path / "view.html"

    @property
    def trace(self) -> Path:
        """The timeline as Perfetto and chrome://tracing read it."""
        return self.path / "trace.json.gz"

    @property
    def summary(self) -> Path:
        """The report's tables."""
        return self.path / "summary.md"

    @property
    def curve(self) -> Path:
        """The report's picture."""
        return self.path / "curve.png"

    @property
    def service(self) -> Path:
        """Where the rollout service is; gone when it ends."""
        return self.path / "service.json"

    @property
    def service_key(self) -> Path:
        """The key of the rollout service, readable by its owner only; gone when it ends."""
        return self.path / "service.key"

    @property
    def certify(self) -> Path:
        """What `megagrpo certify` writes."""
        return self.path / "certify"

    @property
    def bisect(self) -> "RunFolder":
        """What `megagrpo bisect` writes: the run folder of its engine and ranks, with the report."""
        return RunFolder(self.path / "bisect")

    @property
    def bisect_options(self) -> Path:
        """What the ranks of `megagrpo bisect` are told beside the experiment."""
        return self.path / "options.json"

    @property
    def bisect_report(self) -> Path:
        """What a bisection found, for programs."""
        return self.path / "report.json"

    @property
    def sft(self) -> "RunFolder":
        """The record of the supervised warm-up: metrics and TensorBoard."""
        return RunFolder(self.path / "sft")

    def dump(self, step: int) -> Path:
        """The batch of finished step `step`, for `megagrpo replay`."""
        return self.path / "dumps" / f"step_{step:06d}"

    def rollout_file(self, step: int, replica: int) -> Path:
        """The samples of finished step `step` that data-parallel rank `replica` sampled."""
        return self.rollouts / f"step_{step:06d}.replica_{replica}.jsonl"

    def rollout_files(self) -> dict[int, dict[int, Path]]:
        """The samples of all steps, by step and data-parallel rank."""
        found: dict[int, dict[int, Path]] = {}
        for path in sorted(self.rollouts.glob("step_*.replica_*.jsonl")):
            step, replica = (int(word.partition("_")[2]) for word in path.name.split(".")[:2])
            found.setdefault(step, {})[replica] = path
        return found

    def timeline_file(self, rank: int) -> Path:
        """What rank `rank` did in every step, and what it asked of the engines."""
        return self.path / "timeline" / f"rank_{rank}.jsonl"

    def timeline_files(self) -> dict[int, Path]:
        """The timelines there are, by rank."""
        return _numbered(self.path / "timeline", "rank_")

    def trained_file(self, replica: int) -> Path:
        """Advantages and tokens of the samples that data-parallel rank `replica` trained on."""
        return self.path / "trained" / f"replica_{replica}.jsonl"

    def trained_files(self) -> dict[int, Path]:
        """The files of all data-parallel ranks, by rank."""
        return _numbered(self.path / "trained", "replica_")

    # ---- logs --------------------------------------------------------------------------------------------------------

    @property
    def logs(self) -> Path:
        """Logs of all processes, and what they leave for one another."""
        return self.path / "logs"

    def log(self, name: str) -> Path:
        """What the child `name` prints: "service", "trainer", or on node 1 of several "trainer-1"."""
        return self.logs / f"{name}.log"

    def stop_request(self, name: str) -> Path:
        """Asks the ranks that `name` starts to save and leave."""
        return self.logs / f"{name}.stop_request"

    def error_report(self, name: str, rank: int, final: bool) -> Path:
        """Why rank `rank` of the command `name` failed. `final`: another try would end in the same way."""
        return self.logs / f"error_{name}_rank{rank}{'.final.txt' if final else '.txt'}"

    def error_reports(self, name: str) -> list[Path]:
        """The reports of all ranks of the command `name`, on all nodes."""
        return list(self.logs.glob(f"error_{name}_rank*.txt"))

    def has_final_report(self, name: str) -> bool:
        """Whether a rank of the command `name` failed in a way that another try would repeat."""
        return any(self.logs.glob(f"error_{name}_rank*.final.txt"))

    def deadline_page(self, moment: str) -> Path:
        """Who waited for whom at `moment`, with all stacks."""
        return self.logs / f"deadline_{moment}.txt"

    def deadline_pages(self) -> set[Path]:
        """All pages of this folder."""
        return set(self.logs.glob("deadline_*.txt"))

    @property
    def ranks(self) -> Path:
        """Where ranks tell one another what they do."""
        return self.logs / "ranks"

    def rank_place(self, rank: int) -> Path:
        """Where rank `rank` is in its step."""
        return self.ranks / f"rank_{rank}.json"

    def rank_stacks(self, rank: int) -> Path:
        """The Python stacks of rank `rank`, when somebody asked for them."""
        return self.ranks / f"rank_{rank}.stacks"

    def stacks_request(self, start: str) -> Path:
        """Asks all ranks of the start at `start` for their stacks."""
        return self.ranks / f"asked_{start}"


def _numbered(folder: Path, prefix: str) -> dict[int, Path]:
    found = {int(path.stem.removeprefix(prefix)): path for path in folder.glob(f"{prefix}*.jsonl")}
    return dict(sorted(found.items()))
