"""How much of a group's common prompt is read once, by which engine gets its samples and the order
in an engine.

    python bench/group_prefix.py

Two real engines of a random model on CPUs behind the router: 16 groups of 8 samples with prompts of
2,000 tokens, all requested at once. Writes bench/results/group_prefix.{json,md}.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import ROOT, provenance, write_results

sys.path.pop(0)  # this folder, whose statistics.py torch would take for Python's own
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
sys.path.insert(0, str(ROOT))

from running_service import RunningService, running_service
from tiny_model import make_tiny_model

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.admission import Turnstile
from megagrpo.rollout.generation import GenerationClient, RetryPolicy, SampleRequest, SamplingParams

GROUPS, SAMPLES, PROMPT = 16, 8, 2000
HEADER = (
    "a group's samples",
    "order in an engine",
    "tokens of prompts",
    "found in a cache",
    "share",
    "seconds",
)


async def sampled(service: RunningService, together: bool, seed: int) -> dict:
    """Returns the prompt tokens of all requests, those found in a cache, and the seconds."""
    random = np.random.default_rng(seed)
    prompts = random.integers(5, 20, (GROUPS, PROMPT))
    status = service.control.status()
    async with GenerationClient(
        status.router, service.control.api_key, RetryPolicy(2, 300.0), Turnstile(512)
    ) as client:
        requests = [
            SampleRequest(
                prompts[group],
                SamplingParams(1.0, 4),
                group * SAMPLES + sample,
                1,
                routing_key=f"{seed}-{group}" if together else f"{seed}-{group}-{sample}",
            )
            for group in range(GROUPS)
            for sample in range(SAMPLES)
        ]
        start = time.perf_counter()
        responses = await asyncio.gather(*map(client.generate, requests))
        seconds = time.perf_counter() - start
    return {
        "read": len(requests) * PROMPT,
        "cached": sum(r.num_cached for r in responses),
        "seconds": seconds,
    }


def main() -> None:
    found, lines = {}, []
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        for order in ("fcfs", "lpm"):
            rollout = {
                "num_engines": 2, "load_format": "model", "start_timeout_s": 400.0, "max_total_tokens": 60000,
                "max_running_requests": 128, "engine_choice": "group", "sglang": {"schedule_policy": order},
            }  # fmt: skip
            config = ExperimentConfig.model_validate(
                {
                    "name": "bench",
                    "output_dir": folder,
                    "model": {"path": str(model)},
                    "data": {"path": "none"},
                }
                | {"rollout": rollout}
            )
            with running_service(config, Path(folder) / order) as service:
                for number in range(2):
                    service.set_version(1, number)
                for name, together in (("each to any engine", False), ("all to one engine", True)):
                    row = found[f"{order}, {name}"] = asyncio.run(
                        sampled(service, together, len(found))
                    )
                    share = f"{row['cached'] / row['read']:.1%}"
                    lines.append(
                        (
                            name,
                            order,
                            f"{row['read']:,}",
                            f"{row['cached']:,}",
                            share,
                            f"{row['seconds']:.0f}",
                        )
                    )
    data = (
        provenance()
        | {"engines": 2, "groups": GROUPS, "samples": SAMPLES, "prompt": PROMPT}
        | found
    )
    write_results("group_prefix", data, HEADER, lines)


if __name__ == "__main__":
    main()
