"""Measures the same batch under one case after another, on one rank, against the one-rank reference."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.actor.layers.lora import InitialAdapters
from megagrpo.actor.megatron_actor import MegatronActor, leave_distributed
from megagrpo.actor.step import backward, denominators_of, token_logprobs, update, with_logprobs
from megagrpo.algo.advantage import with_advantages
from megagrpo.batching.batch import build_batch
from megagrpo.batching.updates import plan_updates
from megagrpo.certify.cases import REFERENCE, Case
from megagrpo.certify.faults import planted
from megagrpo.certify.subject import MAX_PROMPT, MAX_RESPONSE, NUM_GROUPS, longest, make_groups, near
from megagrpo.config.schema import ActorConfig, ExperimentConfig, OptimizerConfig, ParallelConfig
from megagrpo.families.table import read_architecture
from megagrpo.mesh import Mesh
from megagrpo.system import environment
from megagrpo.system.run_folder import write_whole
from megagrpo.types import AlgoState, Batch, RolloutGroup
from megagrpo.weights.actor_weights import ActorWeights, load_initial_weights
from megagrpo.weights.hf_folder import HfFolder
from megagrpo.weights.transports.gather_plan import gather_buckets, make_gather_plan, published_specs

# A large epsilon: Adam divides by |g|, which would turn rounding noise of a vanishing gradient into a full step.
OPTIMIZER = OptimizerConfig(lr=1e-3, clip_grad=1.0, adam_eps=1e-4, distributed=False)
_CHUNK_TOKENS = 32


@contextmanager
def joined(
    store: Path,
    *,
    config: ActorConfig,
    optimizer: OptimizerConfig,
    model_path: str,
    device: torch.device,
    num_updates: int = 10,
) -> Iterator[MegatronActor]:
    """Makes this process a rank of a fresh world with this layout. `store`: a path that no world has used yet."""
    world, rank = environment.get_int("WORLD_SIZE", 1), environment.get_int("RANK", 0)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    meeting = dist.FileStore(str(store), world)  # type: ignore[attr-defined]  # torch does not declare the export
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world)
    built = None
    try:
        built = MegatronActor(
            model_path=model_path, config=config, optimizer=optimizer, num_updates=num_updates, seed=0, device=device
        )
        yield built
    finally:
        leave_distributed(built)


def whole(weights: ActorWeights, values: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Collective. Returns weights or gradients as whole HF tensors on the main rank, {} elsewhere."""
    specs = published_specs(weights.hf_specs, torch.float32)
    plan = make_gather_plan(mesh.gather_world(weights.copies), specs, 1 << 30)
    return {name: tensor.clone() for bucket in gather_buckets(plan, values, mesh) for name, tensor in bucket.items()}


def ratios(
    weights: ActorWeights, values: Mapping[str, Tensor], reference: Mapping[str, Tensor], mesh: Mesh
) -> dict[str, float]:
    """Collective. Returns max|v - r| / max|r| by HF tensor, the largest of all ranks: replicas are compared too."""
    found: dict[str, float] = {}
    for copy in weights.copies:
        whole_tensor = reference[copy.hf]
        part = whole_tensor[tuple(slice(a, a + n) for a, n in zip(copy.start, copy.size, strict=True))]
        largest = float(whole_tensor.abs().max())
        error = float((copy.view(values).cpu() - part).abs().max())
        ratio = error / largest if largest else (0.0 if error == 0 else float("inf"))
        found[copy.hf] = max(
            found.get(copy.hf, 0.0), ratio if ratio == ratio else float("inf")
        )  # NaN compares with nothing
    everyone: list = [found] * mesh.world_size
    if mesh.world_size > 1:
        dist.all_gather_object(everyone, found)
    return {name: max(part.get(name, 0.0) for part in everyone) for name in reference}


def certify_ranks(config: ExperimentConfig, device: torch.device) -> None:
    """Collective. Runs the cases of `<output_dir>/cases.json` and writes results.json beside it."""
    folder = Path(config.output_dir)
    cases = [Case(**case) for case in json.loads((folder / "cases.json").read_text())]
    results = []
    for number, case in enumerate(cases):
        results.append(
            {
                "case": asdict(case),
                "variant": case.variant,
                **measure(config, case, folder=folder.parent, store=folder / f"store{number}", device=device),
            }
        )
        if environment.get_int("RANK", 0) == 0:
            print(
                f"certify: {case.ranks} ranks, {number + 1} of {len(cases)}: {case.layout}, {case.variant}", flush=True
            )
    if environment.get_int("RANK", 0) == 0:
        write_whole(folder / "results.json", json.dumps(results))


def measure(config: ExperimentConfig, case: Case, *, folder: Path, store: Path, device: torch.device) -> dict:
    """Collective. Returns one case's loss, gradient norm, and differences to `folder`/reference.pt.

    The reference case writes that file.
    """
    actor_config = ActorConfig(
        world_size=case.ranks,
        parallel=ParallelConfig(**case.parallel),
        packing=case.packing,
        micro_batch_tokens=case.budget,
        recompute=case.recompute,
        transformer_engine=config.actor.transformer_engine,
        logprob_chunk_tokens=_CHUNK_TOKENS,
        deadline_s=config.actor.deadline_s,
        lora=config.actor.lora,
        router_losses=config.actor.router_losses,
        routing_replay=config.actor.routing_replay,
    )
    changes: dict = {"distributed": case.distributed}
    if config.actor.lora is not None:
        changes["adam_eps"] = 1e-3  # smaller than weights, adapters would show the same rounding as a larger share
    optimizer = OPTIMIZER.model_copy(update=changes)
    groups = make_groups(config, config.seed, read_architecture(config.model.path))
    with (
        planted(case.fault) as plant,
        joined(store, config=actor_config, optimizer=optimizer, model_path=config.model.path, device=device) as actor,
    ):
        if config.algorithm.uses_reference:
            actor.load_hf(HfFolder(folder / "reference"))
            actor.keep_reference()
        weights = load_initial_weights(actor, config.model.path)
        weights = actor.trained_weights(weights)
        if config.actor.lora is not None:
            actor.load_adapters(_trained_a_little(actor))
            actor.weights_loaded()
        plant(actor)
        if case == REFERENCE:
            return _reference(config, actor, weights, groups, folder / "reference.pt")
        reference = torch.load(folder / "reference.pt")
        return _compare(config, actor, weights, groups, reference, readable_gradients=not case.distributed)


def _trained_a_little(actor: MegatronActor) -> dict[str, Tensor]:
    """Returns whole adapters of a model that has learned: with B still 0, A would have no gradient."""
    initial = InitialAdapters(actor.adapter_specs(), seed=0)
    return {name: near(values, 0.05, number) for number, (name, values) in enumerate(initial.items())}


def _placed(config: ExperimentConfig, actor: MegatronActor, groups: list[RolloutGroup]) -> Batch:
    train = config.train.model_copy(update={"num_prompts_per_step": NUM_GROUPS})
    updates = plan_updates(train, config.seed, step=0)
    layers = actor.routing.layers if actor.routing is not None else None
    return build_batch(groups[actor.mesh.dp_rank :: actor.mesh.dp_size], updates, actor.mesh, routed_layers=layers)


def _prepared(config: ExperimentConfig, actor: MegatronActor, groups: list[RolloutGroup], base: Tensor) -> Batch:
    """Collective. Returns this rank's share with all that the experiment's loss needs.

    base: [samples, S] log-probabilities of the one-rank model. Those of the rollout and of the old policy are noise
    around it, far enough for clips to act; the reference's are computed.
    """
    algorithm, temperature, mesh = config.algorithm, config.sampling.temperature, actor.mesh
    batch = _placed(config, actor, groups)
    everyone = [old := near(base, 0.15, seed=7), near(old, 0.02, seed=8)]
    old, rollout = (t[batch.sample_ids][_inside(batch)] * batch.loss_mask for t in everyone)
    reference = algorithm.kl.estimator if algorithm.uses_reference else None
    batch = with_logprobs(actor, batch, temperature, config.actor.routing_replay == "old", reference)
    batch = replace(batch, old_logprobs=old, rollout_logprobs=rollout)
    return with_advantages(batch, algorithm, mesh.reduce, AlgoState(), longest(config))[0]


def _inside(batch: Batch) -> Tensor:
    """Returns where in [N, longest of any batch] the batch's tokens are."""
    return torch.arange(MAX_PROMPT + MAX_RESPONSE) < batch.lengths[:, None]


def _backward(config: ExperimentConfig, actor: MegatronActor, batch: Batch) -> float:
    """Collective. Computes the gradients of the experiment's loss over all samples; returns the loss."""
    rows, algorithm = range(len(batch.lengths)), config.algorithm
    denominators = denominators_of(actor, batch, rows, algorithm, longest(config))
    return backward(actor, batch, rows, algorithm, config.sampling.temperature, denominators)["loss/total"]


def _take_passes(config: ExperimentConfig, actor: MegatronActor, batch: Batch) -> None:
    """Collective. Makes the step's own updates where it passes over its samples several times.

    With one pass they are updates like the one that was measured.
    """
    if config.train.num_epochs_per_step > 1:
        update(actor, batch, config.algorithm, config.sampling.temperature, longest(config))


def _reference(
    config: ExperimentConfig, actor: MegatronActor, weights: ActorWeights, groups: list[RolloutGroup], file: Path
) -> dict:
    batch = _placed(config, actor, groups)
    base = torch.zeros(len(batch.lengths), MAX_PROMPT + MAX_RESPONSE)
    base[_inside(batch)] = token_logprobs(actor, batch, config.sampling.temperature)
    batch = _prepared(config, actor, groups, base)
    loss = _backward(config, actor, batch)
    gradients = whole(weights, actor.gradients(), actor.mesh)
    norm = actor.optimizer_step()["optim/grad_norm"]
    _take_passes(config, actor, batch)
    moved = whole(weights, actor.trained(), actor.mesh)
    torch.save({"base": base, "loss": loss, "norm": norm, "gradients": gradients, "weights": moved}, file)
    none = dict.fromkeys(gradients, 0.0)
    return {"loss": loss, "loss_error": 0.0, "grad_norm": norm, "norm_error": 0.0, "gradients": none, "weights": 0.0}


def _compare(
    config: ExperimentConfig,
    actor: MegatronActor,
    weights: ActorWeights,
    groups: list[RolloutGroup],
    reference: dict,
    readable_gradients: bool,
) -> dict:
    """Compares with the reference.

    The distributed optimizer leaves each rank its shard of the summed gradient: then updated weights speak for them.
    """
    batch = _prepared(config, actor, groups, reference["base"])
    loss = _backward(config, actor, batch)
    gradients = ratios(weights, actor.gradients(), reference["gradients"], actor.mesh) if readable_gradients else {}
    norm = actor.optimizer_step()["optim/grad_norm"]
    _take_passes(config, actor, batch)
    tokens = (
        MAX_RESPONSE if config.algorithm.aggregation == "seq-mean-token-sum" else 1
    )  # a sum of as many terms rounds more
    moved = ratios(weights, actor.trained(), reference["weights"], actor.mesh)
    return {
        "loss": loss,
        "loss_error": abs(loss - reference["loss"]) / tokens,
        "grad_norm": norm,
        "norm_error": abs(norm / reference["norm"] - 1),
        "gradients": gradients,
        "weights": max(moved.values()),
    }
