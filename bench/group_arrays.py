"""What responses cost between the engines' answers and the batch: arrays of today, Python numbers of an earlier commit.

Four gloo ranks, two replicas of two. Leaders parse the engines' answers, share the groups with their replica, all build
the batch (samples cross ranks where balance wants it), and the samples are recorded. Both sides run the same answers in
turn; bytes are those that leave a rank. The earlier commit is laid out in a temporary folder with `git archive`.

usage: python bench/group_arrays.py [--samples 1024] [--tokens 8192] [--earlier 51f2e56] [--rounds 2] [--no-write]
"""

import argparse
import io
import json
import os
import random
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
WORLD, REPLICAS, GROUP_SIZE, PROMPT_TOKENS, VOCABULARY = 4, 2, 16, 200, 150_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--earlier", default="51f2e56")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.rank is not None:
        _rank_main(args.rank, args.folder, args.samples, args.tokens)
        return
    sys.path.insert(0, str(ROOT))
    from bench.common import provenance, write_results

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packed = subprocess.run(["git", "archive", args.earlier], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder / "earlier", filter="data")
        sides = {"earlier": folder / "earlier", "now": ROOT}
        runs: dict[str, list[dict]] = {side: [] for side in sides}
        for number in range(args.rounds):
            for side, code in sides.items():
                runs[side].append(_run(code, folder / f"{side}{number}", args))
    names = list(runs["now"][0])
    lines = []
    for name in names:
        earlier, now = (min(run[name] for run in runs[side]) for side in sides)
        lines.append([name, f"{earlier:,.2f}", f"{now:,.2f}", f"{earlier / now:.1f}" if now else "-"])
    what = {"samples": args.samples, "tokens": args.tokens, "earlier": args.earlier, "rounds": args.rounds}
    if args.no_write:
        print(*lines, sep="\n")
        return
    header = ["of the slowest or fullest rank", f"Python numbers ({args.earlier})", "arrays", "ratio"]
    write_results("group_arrays", provenance() | what | {"runs": runs}, header, lines)


def _run(code: Path, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """One run of four ranks of the package in `code`; the largest value of any rank by name."""
    folder.mkdir(parents=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--folder", str(folder)]
    command += ["--samples", str(args.samples), "--tokens", str(args.tokens)]
    env = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=env, cwd=folder) for rank in range(WORLD)]
    try:
        codes = [rank.wait(1200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * WORLD, codes
    found = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(WORLD)]
    return {name: max(values[name] for values in found) for name in found[0]}


class _Crossing:
    """Counts the bytes that this rank gives to others inside the block: pickled objects once, and what it exchanges."""

    def __enter__(self) -> "_Crossing":
        self.bytes = 0
        self._originals = core, exchange = dist.distributed_c10d._object_to_tensor, dist.all_to_all_single

        def counted_object(obj, *rest):
            found = core(obj, *rest)
            self.bytes += found[0].numel()
            return found

        def counted_exchange(out, data, out_sizes=None, in_sizes=None, group=None, **rest):
            if in_sizes is not None:
                self.bytes += sum(in_sizes) - in_sizes[dist.get_rank(group)]
            return exchange(out, data, out_sizes, in_sizes, group=group, **rest)

        dist.distributed_c10d._object_to_tensor, dist.all_to_all_single = counted_object, counted_exchange
        return self

    def __exit__(self, *exc_info) -> None:
        dist.distributed_c10d._object_to_tensor, dist.all_to_all_single = self._originals


def _answers(rank: int, samples: int, tokens: int) -> list[bytes]:
    """What an engine answers to the samples of this replica, half of them half as long."""
    source = random.Random(rank)
    found = []
    for index in range(samples // REPLICAS):
        length = tokens if index % 2 else tokens // 2
        pairs = [[-source.random() * 3, source.randrange(VOCABULARY), None] for _ in range(length)]
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "3", "output_token_logprobs": pairs}
        found.append(json.dumps({"meta_info": meta}).encode())
    return found


def _rank_main(rank: int, folder: Path, samples: int, tokens: int) -> None:
    # An editable installation would lend the earlier commit the modules that it does not have yet.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not str(finder).count("__editable__")]
    from megagrpo.mesh import make_mesh

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), WORLD), rank=rank, world_size=WORLD, timeout=timedelta(600)
    )
    per_replica = WORLD // REPLICAS
    mesh = make_mesh(rank // per_replica, REPLICAS, torch.device("cpu"), 600.0)
    _measure(mesh, folder / "warm", GROUP_SIZE * REPLICAS, 8)  # imports, and the first use of everything
    values = _measure(mesh, folder, samples, tokens)
    values["MiB at the peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (folder / f"rank_{rank}.json").write_text(json.dumps(values))
    dist.barrier()
    os._exit(0)


def _measure(mesh, folder: Path, samples: int, tokens: int) -> dict[str, float]:
    answers = _answers(mesh.dp_rank, samples, tokens) if mesh.is_leader else []
    values: dict[str, float] = {}
    held = _resident()

    def timed(name: str, action):
        dist.barrier()
        start = time.perf_counter()
        result = action()
        values[f"seconds to {name}"] = time.perf_counter() - start
        return result

    made = timed("parse answers", lambda: _groups(answers, mesh.dp_rank, samples) if mesh.is_leader else [])
    values["MiB held by parsed groups"] = (_resident() - held) / 2**20 if mesh.is_leader else 0.0
    with _Crossing() as crossing:
        for_others = _for_others()
        shared = lambda: mesh.from_leader(lambda: list(map(for_others, made)), "share")  # noqa: E731
        groups = timed("share groups with the replica", shared)
        groups = made if mesh.is_leader else groups
        timed("build the batch", lambda: _batch(groups, samples, mesh))
        timed("record samples, as far as the loop waits", lambda: _record(groups, mesh, folder))
    values["seconds in all"] = sum(seconds for name, seconds in values.items() if name.startswith("seconds"))
    values["MiB that leave a rank"] = crossing.bytes / 2**20
    return values


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _groups(answers: list[bytes], replica: int, samples: int) -> list:
    from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample

    try:
        import orjson

        from megagrpo.rollout.generation import _read_response, collector_paused

        def read(answer: bytes):
            with collector_paused():
                return _read_response(orjson.loads(answer), 3)

        responses = map(read, answers)
    except ImportError:
        from megagrpo.rollout.client import read_response

        responses = (read_response(json.loads(answer), 3) for answer in answers)
    first = replica * (samples // REPLICAS) // GROUP_SIZE
    found: list[Sample] = []
    groups = []
    for response in responses:
        ids, logprobs = response.token_ids, response.logprobs
        found.append(Sample(len(found), ids, logprobs, response.finish_reason, 3, "text " * 500))
        if len(found) == GROUP_SIZE:
            prompt = Prompt(len(groups), "prompt", tuple(range(PROMPT_TOKENS)), "answer")
            outcomes = tuple(Outcome("score", float(i)) for i in range(GROUP_SIZE))
            groups.append(RolloutGroup(first + len(groups), prompt, tuple(found), outcomes))
            found = []
    return groups


def _for_others() -> Callable:
    """What a leader makes of a group before it shares it."""
    try:
        from megagrpo.rollout.routed_experts import for_other_ranks

        return for_other_ranks
    except ImportError:
        return lambda group: group


def _batch(groups: list, samples: int, mesh) -> object:
    try:
        from megagrpo.batching.batch import build_batch
        from megagrpo.batching.updates import one_pass

        return build_batch(groups, one_pass(samples // GROUP_SIZE), mesh, 8192)
    except ImportError:
        from megagrpo.data.batch import build_batch

        return build_batch(groups, samples // GROUP_SIZE, 1, mesh, 8192)


def _record(groups: list, mesh, folder: Path) -> None:
    try:
        from megagrpo.monitor.rollouts import RolloutLog
        from megagrpo.system.run_folder import RunFolder

        if mesh.is_leader:
            RolloutLog(RunFolder(folder), mesh.dp_rank, mesh.dp_size).write(1, groups)
    except ImportError:
        from megagrpo.metrics import _rollout_record, write_json_lines

        parts = mesh.gather_main(groups)
        if mesh.is_main:
            in_order = sorted((group for part in parts for group in part), key=lambda group: group.group_id)
            folder.mkdir(exist_ok=True)
            write_json_lines(folder / "rollouts.jsonl", map(_rollout_record, in_order))


if __name__ == "__main__":
    main()
