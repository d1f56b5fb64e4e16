"""The host side of a GRPO step beside verl 0.9.1, TRL 1.16 and slime's way, on the same work.

    PYTHONPATH=. python bench/peers.py FOLDER    # about 15 minutes; 3 GB of memory

FOLDER: of the peers' environment, which the first call makes: their packages over those of this
Python, so all sides use one torch and one transformers. Sides take turns, and the table has the
least CPU seconds and memory of `--repeats`. One thread; no GPU is used.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import venv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from common import RESULTS, ROOT, provenance, write_results

# verl's metadata bound transformers and torch below ours, and ask for wandb and others that these
# functions do not use
PEERS = ("verl==0.9.1", "trl==1.16.0")
NEEDED = (
    "datasets==5.2.0",
    "tensordict==0.10.0",
    "torchdata",
    "hydra-core",
    "codetiming",
    "dill",
    "pylatexenc",
    "cachetools",
)
LIMIT_S = 1500.0


def environment(folder: Path, peers: Sequence[str] = PEERS, needed: Sequence[str] = NEEDED) -> Path:
    """Returns the Python of the peers' environment, which is made if it is not there. peers: to be
    installed without what they ask for."""
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=True)
        ours = sysconfig.get_paths()["purelib"]
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (folder / "lib" / version / "site-packages" / "shared.pth").write_text(ours + "\n")
        install = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, "--no-deps", *peers], check=True)
        if needed:
            subprocess.run([*install, *needed], check=True)
        done.write_text("\n".join((*peers, *needed)) + "\n")
    return python


def in_words(value: float, ours: float) -> str:
    """Returns a figure, and how many times ours it is."""
    if value != value:
        return "-"
    digits = 3 if value < 10 else 0
    return f"{value:.{digits}f}" + (f" ({value / ours:.2g}x)" if ours > 0 else "")


def measure(args: argparse.Namespace) -> None:
    """Measures in this process, and writes the table."""
    from megagrpo.system.torchvision import prepare_torchvision

    prepare_torchvision()
    from peers_kit import advantages, answers, data, grading, head, loss, packing, travelling
    from peers_kit.measure import OURS, measured, preload, versions

    parts = (advantages, packing, answers, loss, head, grading, data, travelling)
    cases = [case for part in parts for case in part.CASES]
    if args.items:
        cases = [case for case in cases if any(case.item.startswith(i) for i in args.items)]
    origin = provenance()
    known = versions(str(origin["commit"]))
    problems = preload({case.peer for case in cases} & known.keys())
    for module, problem in problems.items():
        print(f"{module}: {problem}", file=sys.stderr, flush=True)
    if any(case.item == data.ITEM for case in cases):
        data.folder()
    rows, lines = [], []
    for item in dict.fromkeys(case.item for case in cases):
        sides = [case for case in cases if case.item == item]
        found = measured(sides, args.repeats, LIMIT_S, known)
        ours = found[0]
        for row in found:
            rows.append(vars(row))
            print(row, file=sys.stderr, flush=True)
            if differences := row.notes.get("differences"):
                kinds = [kind for kind, _, _ in grading.work()]
                row.notes["kinds"] = dict(Counter(kinds[i] for i in differences))
            said = {k: v for k, v in row.notes.items() if k not in ("differences", "kinds")}
            notes = row.problem or ", ".join(f"{name} {value}" for name, value in said.items())
            if row.difference is not None and "disagree" not in row.notes:
                notes += f"{'; ' if notes else ''}differs by {row.difference:.1g}"
            own = row.side == OURS
            seconds = in_words(row.seconds, 0.0 if own else ours.seconds)
            megabytes = in_words(row.megabytes, 0.0 if own else ours.megabytes)
            lines.append((item, row.side, seconds, megabytes, notes))
    header = ("work", "side", "CPU s", "peak MB", "notes")
    data_written = origin | {"versions": known, "problems": problems, "rows": rows}
    write_results("peers", data_written, header, lines, args.results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the peers' environment, and of the data")
    parser.add_argument("--own", action="store_true", help="this Python, with what it has")
    parser.add_argument("--items", nargs="+", help="beginnings of their names")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--scale", default="1", help="of the work, 1 or less")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    threads = ("OMP", "MKL", "OPENBLAS", "RAYON")
    os.environ |= {f"{name}_NUM_THREADS": "1" for name in threads} | {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PEERS_SCALE": args.scale,
        "PEERS_FOLDER": str(args.folder.resolve()),
        "PYTHONPATH": str(ROOT),
    }
    if args.own:
        measure(args)
        return
    python = environment(args.folder.resolve())
    subprocess.run([python, "-W", "ignore", __file__, "--own", *sys.argv[1:]], check=True)


if __name__ == "__main__":
    main()
