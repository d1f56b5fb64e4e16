"""What a save and a resume cost, measured, against what `megagrpo check` says: files, host memory,
bytes read.

    python bench/checkpoints.py [--layers 8 | --compare-again]

A random model of at least 500 MB in float32, with the distributed optimizer's state, is saved in
the background in both forms and resumed by fresh processes, under DP2, TP2xPP2 and (mixture of
experts) EP2. Host memory: the peak of every rank's resident memory over what it had before the
save, summed. Bytes read: of all reads of all ranks, from the start of the resume to its end, the
Hugging Face folder's headers included. Writes bench/results/checkpoints.{json,md}; with
--compare-again it keeps what was measured there and computes anew what is said.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.common import RESULTS, provenance, write_results
from examples.laptop.recipe import TinyModelConfig
from megagrpo.config.schema import ActorConfig, CheckpointConfig
from megagrpo.models.folder import Model
from megagrpo.models.table import architecture_of, parameter_counts
from megagrpo.tools.certify.tiny_model import hf_config
from megagrpo.tools.plan.checkpoint_cost import checkpoint_cost

CASES: dict[str, tuple[str, int, dict[str, int]]] = {  # family, ranks, layout
    "DP2": ("qwen3", 2, {}),
    "TP2xPP2": ("qwen3", 4, {"tp": 2, "pp": 2}),
    "EP2": ("qwen3_moe", 2, {"ep": 2}),
}
FORMS = {"own parts": False, "any layout": True}
HEADER = (
    "layout",
    "weights",
    "form",
    "files, MB",
    "said",
    "host memory of a save, MB",
    "said",
    "read by a resume, MB",
    "said",
)
BOUND = 0.15


def model_of(family: str, layers: int, folder: Path) -> TinyModelConfig:
    """A model of about 17 (dense) or 28 (mixture of experts) million parameters a layer."""
    return TinyModelConfig(
        path=str(folder / family),
        family=family,
        hidden_size=1024,
        num_layers=layers if family == "qwen3" else layers * 5 // 8 // 2 * 2 + 1,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        ffn_size=4096,
        num_experts=8,
        expert_ffn_size=1024,
    )


def actor_of(world: int, parallel: dict[str, int]) -> ActorConfig:
    """The actor of one case; its optimizer is distributed."""
    return ActorConfig.model_validate(
        {"world_size": world, "parallel": parallel, "deadline_s": 600.0}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--compare-again", action="store_true", help="measure nothing, compute what is said anew"
    )
    parser.add_argument("--as-rank", nargs=2, metavar=("CASE", "PHASE"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        as_rank(*args.as_rank, args.layers, Path(args.folder))
        return
    if args.compare_again:
        data = json.loads((RESULTS / "checkpoints.json").read_text())
    else:
        data = {**provenance(), "layers": args.layers, "rows": []}
        for name in CASES:
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                print(f"{name} ...", flush=True)
                data["rows"] += case(name, args.layers, Path(folder))
    rows = [row | said(row["layout"], row["form"], data["layers"]) for row in data["rows"]]
    worst = max(
        max(abs(row[what] / row[f"{what} said"] - 1) for what in ("files", "host", "read"))
        for row in rows
    )
    data |= {"largest difference": worst, "rows": rows}
    write_results("checkpoints", data, HEADER, [line(row) for row in rows])
    print(
        f"largest difference {worst:.1%}: {'within' if worst <= BOUND else 'NOT within'} "
        f"{BOUND:.0%}"
    )


def case(name: str, layers: int, folder: Path) -> list[dict]:
    """Saves in both forms, resumes from each; one row a form."""
    family = CASES[name][0]
    make = (
        "import sys; from bench.checkpoints import *; from examples.laptop.model import "
        "make_tiny_model; "
    )
    make += f"make_tiny_model(model_of({family!r}, {layers}, Path({str(folder)!r})), 0)"
    run([sys.executable, "-W", "ignore", "-c", make])
    rows = []
    for form in FORMS:
        figures = {
            phase: launch(name, f"{phase} {form}", layers, folder) for phase in ("save", "resume")
        }
        rows.append(
            {
                "layout": name,
                "form": form,
                "files": sum(f.stat().st_size for f in (folder / form).rglob("*") if f.is_file()),
                "host": sum(rank["host"] for rank in figures["save"]),
                "read": sum(rank["read"] for rank in figures["resume"]),
                "save_s": max(rank["seconds"] for rank in figures["save"]),
                "resume_s": max(rank["seconds"] for rank in figures["resume"]),
            }
        )
    return rows


def said(name: str, form: str, layers: int) -> dict:
    """What `megagrpo check` computes for one row."""
    family, world, parallel = CASES[name]
    arch = architecture_of(hf_config(model_of(family, layers, Path())))
    cost = checkpoint_cost(arch, actor_of(world, parallel), ranks_per_node=world)
    return {
        "weights": parameter_counts(arch).total * 4,
        "files said": cost.file_bytes,
        "host said": cost.save_host_bytes[FORMS[form]],
        "read said": cost.read_bytes,
    }


def launch(name: str, phase: str, layers: int, folder: Path) -> list[dict]:
    """Runs the ranks of one case through one phase; returns each rank's figures."""
    ranks = CASES[name][1]
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    # as a module: this folder on the path would put its statistics.py before Python's own
    me = [
        "-m",
        "bench.checkpoints",
        "--as-rank",
        name,
        phase,
        "--layers",
        str(layers),
        "--folder",
        str(folder),
    ]
    run([*torchrun, "--nproc-per-node", str(ranks), *me])
    return [json.loads((folder / f"{phase}.{rank}.json").read_text()) for rank in range(ranks)]


def run(command: list[str]) -> None:
    """Runs a child whose large blocks of memory go back when they are freed, so that peaks are
    those of live data."""
    root = str(Path(__file__).resolve().parents[1])
    memory = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env={**os.environ, **memory, "PYTHONPATH": root}, text=True, capture_output=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def as_rank(name: str, phase: str, layers: int, folder: Path) -> None:
    """One rank: builds the actor, then saves after one update, or resumes; writes its figures as
    JSON."""
    from megagrpo.actor.host import prepare_host

    device = prepare_host()
    from megagrpo.actor.megatron_actor import MegatronActor
    from megagrpo.actor.saving import load_actor, save_actor
    from megagrpo.checkpoint import save as checkpoint
    from megagrpo.types import TrainState
    from megagrpo.weights.actor_weights import load_initial_weights

    family, world, parallel = CASES[name]
    config, path = actor_of(world, parallel), str(folder / family)
    actor = MegatronActor(
        arch=Model.read(path).arch,
        config=config,
        num_updates=10,
        seed=0,
        device=device,
    )
    what, form = phase.split(" ", 1)
    identity = checkpoint.RunIdentity({}, config.layout)
    if what == "save":
        load_initial_weights(actor, path)
        for gradient in actor.gradients().values():
            gradient.normal_()
        actor.optimizer_step()
        with measured() as figures:
            checkpoint.PendingSave(
                folder / form,
                TrainState(step=1),
                identity,
                CheckpointConfig(keep=1),
                lambda part: save_actor(actor, part, FORMS[form], snapshot=True),
                actor.mesh,
            ).finish()
    else:
        with measured() as figures:
            load_initial_weights(actor, path, overwritten=True)
            checkpoint.load(
                folder / form / "step_000001",
                identity,
                lambda part: load_actor(actor, part),
                actor.mesh,
            )
    (folder / f"{phase}.{actor.mesh.rank}.json").write_text(json.dumps(vars(figures)))


class measured:  # noqa: N801  # reads as a word in `with`
    """Measures a block: peak of resident memory over that before it (bytes), bytes read,
    seconds."""

    def __enter__(self) -> "measured":
        self.host = -_status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.read, self.seconds = -_bytes_read(), -time.perf_counter()
        return self

    def __exit__(self, *exc_info) -> None:
        self.host += _status("VmHWM")
        self.read += _bytes_read()
        self.seconds += time.perf_counter()


def _status(name: str) -> int:
    line = next(
        text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(name)
    )
    return int(line.split()[1]) * 1024


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().splitlines()[0].split()[1])


def line(row: dict) -> tuple[str, ...]:
    """One line of the table."""
    figures = [
        f"{row[what] / 1e6:,.0f}"
        for part in ("files", "host", "read")
        for what in (part, f"{part} said")
    ]
    return row["layout"], f"{row['weights'] / 1e6:,.0f} MB", row["form"], *figures


if __name__ == "__main__":
    main()
