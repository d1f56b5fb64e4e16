"""One rank that makes updates on the device and tells where the host waited for it, by the GPU kit's own counter."""

import ast
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

from megatron.core.pipeline_parallel import get_forward_backward_func

import megagrpo
from bench.gpu_kit.timing import synchronizations
from megagrpo.actor import schedule, step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.weights.actor_weights import load_initial_weights
from tests.dist.workers.actor_ranks import RICH, batch_of
from tests.dist.workers.harness import DEVICE, with_actors
from tests.dist.workers.routing_replay_ranks import with_planted


@cache
def _functions(file: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]


def function_at(place: str) -> str:
    """Returns file:function of what `synchronizations` calls package/file:line."""
    path, _, line = place.partition(" ")[0].rpartition(":")
    roots = Path(megagrpo.__file__).parents[1], Path(find_spec("megatron.core").origin).parents[2]
    file = next(root / path for root in roots if (root / path).exists())
    around = [node for node in _functions(file) if node.lineno <= int(line) <= node.end_lineno]
    return f"{file.name}:{max(around, key=lambda node: node.lineno).name}"


def measure(actor: MegatronActor, job: dict) -> dict:
    load_initial_weights(actor, job["model"])
    batch = batch_of(actor.mesh)
    batch = with_planted(actor, batch) if actor.routing is not None else batch
    step.update(actor, batch, RICH, 1.0, 32)
    micro_batches: list[int] = []

    def counted():
        run_schedule = get_forward_backward_func()

        def run(**options):
            micro_batches.append(options["num_microbatches"])
            return run_schedule(**options)

        return run

    with patch.object(schedule, "get_forward_backward_func", counted), synchronizations(DEVICE) as found:
        step.update(actor, batch, RICH, 1.0, 32)
    waits = Counter()
    for place, count in found.items():
        waits[function_at(place)] += count
    dense = actor.arch.experts.dense_layers if actor.arch.experts else 0
    layers = [actor.arch.num_layers, actor.arch.num_layers - dense]
    return {"micro_batches": sum(micro_batches), "layers": layers, "waits": waits, "lines": found}


def main(folder: Path) -> None:
    with_actors(folder, measure)
