"""Measures this program on one GPU in at most 8 minutes: one command, one table to send back.

    python bench/gpu.py [--sections NAME ...] [--out FOLDER] [--limit-s 480]
    python bench/gpu.py --device cpu --small     the same sections at small sizes, to see that they
    run

Needs torch >= 2.11, megatron-core and the packages listed in docs/evidence/gpu.md; other libraries
are compared if they are installed. Every section runs in a process of its own under a time limit.
Writes bench/results/gpu_<device>.md and .json; with --device cpu only where --out says. Exit status
1: a section failed, or a figure is above its bound.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if (
    __name__ == "__main__"
):  # the script's own folder would come first, where a statistics.py hides Python's
    sys.path[:] = [
        str(ROOT),
        *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "bench")),
    ]

from bench.common import RESULTS, provenance  # noqa: E402
from bench.gpu_kit.children import Outcome, Section, run_section  # noqa: E402
from bench.gpu_kit.figures import Setting  # noqa: E402
from bench.gpu_kit.report import above_bounds, is_failure, value_of, write_report  # noqa: E402
from megagrpo.system.environment import nccl_variables  # noqa: E402

_KIT = "bench.gpu_kit"
# In order of worth: what the time limit leaves out is at the end.
SECTIONS = {
    "surroundings": Section(f"{_KIT}.surroundings:surroundings", 40),
    "float32 on the CPU": Section(f"{_KIT}.precision:truth", 50, hides_gpu=True),
    "actor": Section(f"{_KIT}.precision:actor", 120),
    "log-probabilities": Section(f"{_KIT}.logprobs:logprobs", 90),
    "step, recompute full": Section(f"{_KIT}.training_step:with_recompute", 60),
    "NCCL alone": Section(f"{_KIT}.groups:alone", 30),
    "NCCL without its peer": Section(f"{_KIT}.groups:without_peer", 50),
    "two ranks on one GPU": Section(f"{_KIT}.pairs:ranks", 30),
    "digests": Section(f"{_KIT}.weights:digests", 30),
    "exchange buckets": Section(f"{_KIT}.weights:buckets", 40),
    "hand-over to another process": Section(f"{_KIT}.pairs:handover", 30),
    "reshard end": Section(f"{_KIT}.pairs:reshard_end", 30),
    "step, no recompute": Section(f"{_KIT}.training_step:without_recompute", 60),
    "memory of a step": Section(f"{_KIT}.training_step:without_logits", 40),
    "head": Section(f"{_KIT}.head:head", 60),
    "experts": Section(f"{_KIT}.experts:experts", 60),
    "updates": Section(f"{_KIT}.updates:updates", 60),
    "checkpoint": Section(f"{_KIT}.checkpoints:checkpoints", 60),
    "certificate": Section(f"{_KIT}.certificate:certificate", 60),
    "certificate of two ranks": Section(f"{_KIT}.certificate:two_ranks", 90),
    "compile time": Section(f"{_KIT}.repeat:compile_time", 90),
    "repeated update": Section(f"{_KIT}.repeat:repeats", 90),
    "engine": Section(f"{_KIT}.engine:engine", 260),
    "decode of a 1.7B": Section(f"{_KIT}.engine:decode", 200),
    "whole loop": Section(f"{_KIT}.engine:loop", 300),
}
_PREPARE_S = 2  # of a section that is still worth starting


def main() -> int:
    args = _arguments()
    origin = provenance() | ({"commit": args.commit} if args.commit else {})
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        _preload()
    else:  # as trainers have it
        os.environ.update(nccl_variables(60))
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with tempfile.TemporaryDirectory(prefix="gpu-kit-", ignore_cleanup_errors=True) as scratch:
        setting = Setting(args.device, args.small, Path(scratch))
        chosen = {name: section for name, section in SECTIONS.items() if name in args.sections}
        outcomes = run_all(chosen, setting, args.limit_s)
    known = args.device == "cuda" and value_of(outcomes, "surroundings", "device")
    folder = args.out or (RESULTS if known else Path(tempfile.mkdtemp(prefix="gpu-kit-")))
    page = write_report(folder, outcomes, origin)
    above = above_bounds(outcomes)
    failed = [outcome.section for outcome in outcomes if is_failure(outcome)]
    for text in above:
        print(f"above its bound: {text}")
    print(
        f"{len(outcomes)} sections, failed: {', '.join(failed) or 'none'}; {page} and .json beside "
        "it"
    )
    return 1 if failed or above else 0


def run_all(sections: dict[str, Section], setting: Setting, limit_s: float) -> list[Outcome]:
    """Runs the sections one after the other, as many as fit into the limit; what fails does not
    hold up the rest."""
    end, outcomes = time.monotonic() + limit_s, []
    for name, section in sections.items():
        left = end - time.monotonic()
        if left < _PREPARE_S:
            outcomes.append(Outcome(name, "not run", reason=f"the kit's {limit_s:.0f} s were over"))
            continue
        outcomes.append(outcome := run_section(name, section, setting, left))
        print(f"{name}: {outcome.status}, {outcome.seconds:.1f} s {outcome.reason}", flush=True)
    return outcomes


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU computes in seconds")
    parser.add_argument(
        "--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="NAME"
    )
    parser.add_argument(
        "--out", type=Path, help="default: bench/results for a GPU, else a temporary folder"
    )
    parser.add_argument("--limit-s", type=float, default=480.0, help="seconds for everything")
    parser.add_argument("--commit", help="where the folder is no git checkout")
    return parser.parse_args()


def _preload() -> None:
    """Imports once what every section would import, before they are forked from this process."""
    warnings.simplefilter("ignore")  # what Megatron says about libraries that are not there
    from megagrpo.actor.host import prepare_host

    prepare_host()
    from megagrpo.cpu.torchvision_ops import define_torchvision_operators

    define_torchvision_operators()
    for module in (
        "megagrpo.actor.step",
        "examples.laptop.model",
        "transformers.models.qwen3.modeling_qwen3",
    ):
        import_module(module)


if __name__ == "__main__":
    status = main()
    if (
        multiprocessing.active_children()
    ):  # they could not be killed, and Python would wait for them
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
