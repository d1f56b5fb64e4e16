"""What megagrpo/tools/bisect/capture.py shows of an actor in some layout, put together as `megagrpo bisect` does."""

from pathlib import Path

import torch
from torch import Tensor

from megagrpo.types import Prompt, Routing

SEED_TOKENS = 7
LENGTHS = (13, 6, 22)


def captured(rank: int, folder: Path, model: Path, cases: list[dict]) -> list[dict[str, Tensor]]:
    """Collective. Of each case everything that both passes over the points show, natural and "forced/..."; rank 0."""
    from megagrpo.config.schema import ActorConfig, OptimizerConfig, ParallelConfig
    from megagrpo.tools.bisect.capture import captured_forward, head_logprobs
    from megagrpo.tools.bisect.compared_points import layer_points, residual_points
    from megagrpo.tools.bisect.engine import Sequenced
    from megagrpo.tools.bisect.procedure import batch_of_sequences
    from megagrpo.tools.bisect.sides import from_trainer
    from megagrpo.tools.certify.measure import joined
    from megagrpo.weights.actor_weights import load_initial_weights
    from tests.padding import padded

    results = []
    for number, case in enumerate(cases):
        case = dict(case)
        world, parallel = case.pop("world"), ParallelConfig(**case.pop("parallel", {}))
        config = ActorConfig(world_size=world, parallel=parallel, deadline_s=60.0, **case)
        settings = {"optimizer": OptimizerConfig(distributed=False), "device": torch.device("cpu")}
        with joined(folder / f"store{world}.{number}", config=config, model_path=str(model), **settings) as actor:
            load_initial_weights(actor, str(model))
            arch, mesh = actor.arch, actor.mesh
            points = {p.name: p for p in residual_points(arch)}
            for layer in range(arch.num_layers):
                points |= {p.name: p for p in layer_points(arch, layer)}
            generator = torch.Generator().manual_seed(SEED_TOKENS)
            rows = [torch.randint(3, arch.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
            batch = batch_of_sequences([Sequenced(Prompt(0, "", row[:2], ""), row[2:], [], "0") for row in rows])
            found: dict[str, Tensor] = {}
            for prefix, forced in (("", None), ("forced/", planted(arch))):
                forward = captured_forward(actor, batch, [p.trainer for p in points.values()], forced)
                assert not forward.problems
                pieces = [piece for part in mesh.gather_world(forward.pieces) for piece in part]
                side = from_trainer(list(points.values()), pieces, {"tokens": LENGTHS}, arch)
                assert not side.notes, side.notes
                found |= {prefix + name: values for name, values in side.values.items()}
                found[f"{prefix}logprobs"] = padded(forward.logprobs, batch.lengths)
            hidden = mesh.gather_world(found["final_norm"])[0]
            hidden = torch.cat([part[:-1] for part in hidden.split(LENGTHS)])
            head = head_logprobs(actor, hidden, torch.tensor([token for row in rows for token in row[1:]]))
            found["head"] = next(values for values in mesh.gather_world(head) if values is not None)
        results.append(found if rank == 0 else {})
    return results


def planted(arch) -> Routing | None:
    """Experts that no router chooses by itself, none of the last token of each sequence; None without experts."""
    if not arch.is_moe:
        return None
    lengths = torch.tensor(LENGTHS)
    places = torch.cat([torch.arange(n) + row for row, n in enumerate(LENGTHS)])
    first = places[:, None] + torch.tensor(arch.routed_layers)
    ids = (first[..., None] + torch.arange(arch.experts.per_token)) % arch.experts.count
    return Routing(ids, lengths - 1)
