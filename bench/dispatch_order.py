"""Does it matter which requests of a batch leave first? Seconds of a rollout by each rollout.order,
with a real engine.

    python bench/dispatch_order.py runs/async/every-32/seed-0/experiment.yaml [--prompts 64]
    [--running 16]

Takes the experiment, the warmed model and the long-tailed problems that bench/async.py has
prepared. One engine runs fewer samples at once than a batch has. Every order samples the same
batches, by the same seeds, in a deterministic engine: the same tokens each time. Each batch comes
twice, so that the second time lengths are known; that one counts. Writes
bench/results/dispatch_order.*
"""

import argparse
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

from common import provenance, write_results

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]
from running_service import RunningService, start_service, wait_for_service  # noqa: E402
from sampling import source_of  # noqa: E402

from megagrpo.config.load import load_config  # noqa: E402
from megagrpo.config.schema import ExperimentConfig  # noqa: E402
from megagrpo.data.prompts import load_prompts, load_tokenizer  # noqa: E402
from megagrpo.rewards.parts import ResponseTokens  # noqa: E402
from megagrpo.types import Outcome, Prompt  # noqa: E402

ORDERS = ("arrival", "long_prompts_first", "shortest_expected_first")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument(
        "--running", type=int, default=16, help="samples that the engine runs at once"
    )
    parser.add_argument("--repeats", type=int, default=5, help="batches")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        settings = ["rollout.load_format=model", "rollout.deterministic=true", f"output_dir={name}"]
        settings.append(f"rollout.max_running_requests={args.running}")
        configs = {
            order: load_config(args.experiment, [*settings, f"rollout.order={order}"])
            for order in ORDERS
        }
        config = configs[ORDERS[0]]
        process = start_service(config, Path(name))
        service = RunningService(config, Path(name), process, wait_for_service(process, Path(name)))
        try:
            service.set_version(0)
            rows = _measure(configs, service, args)
        finally:
            service.stop()
    header = ("order", "seconds of a rollout", "half of the samples after", "fastest", "slowest")
    lines = [
        [row["order"], *(f"{row[k]:.2f}" for k in ("median", "half", "fastest", "slowest"))]
        for row in rows
    ]
    options = {k: str(v) for k, v in vars(args).items()} | {"experiment": args.experiment.name}
    write_results(
        "dispatch_order", {**provenance(), "options": options, "rows": rows}, header, lines
    )


def _measure(
    configs: dict[str, ExperimentConfig], service: RunningService, args: argparse.Namespace
) -> list[dict]:
    config = configs[ORDERS[0]]
    tokenizer = load_tokenizer(config.read_model())
    prompts = load_prompts(config.data, tokenizer)
    grader = _Clock()
    sources = {
        order: source_of(service.control, each, grader, lambda ids: tokenizer.decode(ids))
        for order, each in configs.items()
    }
    seconds: dict[str, list[float]] = {order: [] for order in ORDERS}
    half: dict[str, list[float]] = {order: [] for order in ORDERS}
    tokens: dict[int, set[int]] = {}
    for batch in range(args.repeats):
        wanted = prompts.batch(batch * args.prompts, args.prompts, config.seed)
        for again in range(2):
            for order, source in sources.items():
                grader.times.clear()
                start = time.perf_counter()
                groups = source.next(batch, wanted, 0)
                if again:
                    seconds[order].append(time.perf_counter() - start)
                    half[order].append(sorted(grader.times)[len(grader.times) // 2] - start)
                    tokens.setdefault(batch, set()).add(
                        sum(len(s.token_ids) for g in groups for s in g.samples)
                    )
    for source in sources.values():
        source.close()
    assert all(len(found) == 1 for found in tokens.values()), (
        f"orders sampled other tokens: {tokens}"
    )
    return [
        {
            "order": order,
            "median": _median(seconds[order]),
            "half": _median(half[order]),
            "fastest": min(seconds[order]),
            "slowest": max(seconds[order]),
            "seconds": seconds[order],
        }
        for order in ORDERS
    ]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


class _Clock:
    """Grades nothing, and notes when each response came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def submit(self, prompt: Prompt, text: str, tokens: ResponseTokens) -> Future[Outcome]:
        self.times.append(time.perf_counter())
        future: Future[Outcome] = Future()
        future.set_result(Outcome("score", 0.0))
        return future

    def submit_group(
        self, prompt: Prompt, texts: object, outcomes: object
    ) -> Future[list[Outcome]]:
        raise AssertionError("there is no group grader")


if __name__ == "__main__":
    main()
