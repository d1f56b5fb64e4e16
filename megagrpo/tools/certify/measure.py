"""Runs the cases of one world size on a rank and compares each with the one-rank reference."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.actor.megatron_actor import MegatronActor, leave_distributed
from megagrpo.actor.step import (
    backward,
    denominators_of,
    token_logprobs,
    update,
    with_old_logprobs,
    with_reference,
)
from megagrpo.algo.advantage import with_advantages
from megagrpo.batching.batch import build_batch
from megagrpo.batching.sample_rows import LossNeeds
from megagrpo.batching.updates import plan_updates
from megagrpo.check.problems import refuse_layout
from megagrpo.config.schema import ActorConfig, ExperimentConfig, OptimizerConfig, ParallelConfig
from megagrpo.mesh import Mesh
from megagrpo.models.folder import Model
from megagrpo.models.layers.lora import InitialAdapters
from megagrpo.system import environment
from megagrpo.system.run_folder import write_whole
from megagrpo.tools.certify.cases import KEPT, NEIGHBOR, REFERENCE, Case
from megagrpo.tools.certify.certificate import CaseFigures
from megagrpo.tools.certify.synthetic import (
    MAX_PROMPT,
    MAX_RESPONSE,
    NUM_GROUPS,
    longest,
    make_groups,
    near,
    pixels,
)
from megagrpo.types import AlgoState, Batch
from megagrpo.weights.actor_weights import ActorWeights, load_initial_weights
from megagrpo.weights.hf_folder import HfFolder
from megagrpo.weights.transports.gather_plan import (
    gather_buckets,
    gather_copies,
    make_gather_plan,
    published_specs,
)

# A large epsilon: Adam divides by |g|, which would turn rounding noise of a vanishing gradient into
# a full step.
OPTIMIZER = OptimizerConfig(lr=1e-3, clip_grad=1.0, distributed=False, megatron={"adam_eps": 1e-4})
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
    """Makes this process a rank of a new world with this layout. `store`: a path not used by
    another world."""
    world = environment.get_int("WORLD_SIZE", 1)
    rank = environment.get_int("RANK", 0)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    meeting = dist.FileStore(str(store), world)  # type: ignore[attr-defined]  # torch does not declare the export
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world)
    built = None
    try:
        arch = Model.read(model_path, draft=config.has_draft).arch
        refuse_layout(arch, config)
        built = MegatronActor(
            arch=arch,
            config=config.model_copy(update={"optimizer": optimizer}),
            num_updates=num_updates,
            seed=0,
            device=device,
        )
        yield built
    finally:
        leave_distributed(built)


def whole(weights: ActorWeights, values: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Collective. Returns weights or gradients as whole HF tensors on the main rank, {}
    elsewhere."""
    specs = published_specs(weights.hf_specs, torch.float32)
    plan = make_gather_plan(gather_copies(weights.copies, mesh), specs, 1 << 30)
    buckets = gather_buckets(plan, values, mesh)
    return {name: t.clone() for bucket in buckets for name, t in bucket.items()}


def ratios(
    weights: ActorWeights, values: Mapping[str, Tensor], reference: Mapping[str, Tensor], mesh: Mesh
) -> dict[str, float]:
    """Collective. Returns max|v - r| / max|r| per HF tensor, the maximum over all ranks and
    replicas."""
    worst: dict[str, float] = {}
    for copy in weights.copies:
        whole_tensor = reference[copy.hf].cpu()
        part = whole_tensor[copy.box.slices]
        error = (copy.view(values).cpu() - part).abs().max().double()
        ratio = float(error / whole_tensor.abs().max()) if error else 0.0
        worst[copy.hf] = max(worst.get(copy.hf, 0.0), math.inf if math.isnan(ratio) else ratio)
    everyone = mesh.gather_world(worst)
    return {name: max(part.get(name, 0.0) for part in everyone) for name in reference}


def certify_ranks(config: ExperimentConfig, device: torch.device) -> None:
    """Collective. Runs the cases of `<output_dir>/cases.json`; the main rank writes results.json
    there."""
    folder = Path(config.output_dir)
    cases = [Case(**case) for case in json.loads((folder / "cases.json").read_text())]
    results = []
    is_main = environment.get_int("RANK", 0) == 0
    for number, case in enumerate(cases):
        measured = measure(
            config, case, folder=folder.parent, store=folder / f"store{number}", device=device
        )
        results.append({"case": asdict(case), "variant": case.variant, **measured})
        if is_main:
            progress = f"{number + 1} of {len(cases)}"
            print(
                f"certify: {case.ranks} ranks, {progress}: {case.layout}, {case.variant}",
                flush=True,
            )
    if is_main:
        write_whole(folder / "results.json", json.dumps(results))


def measure(
    config: ExperimentConfig, case: Case, *, folder: Path, store: Path, device: torch.device
) -> CaseFigures:
    """Collective. Returns one case's loss, gradient norm, and differences from
    `folder`/reference.pt, of the models that make_models left there.

    The reference case writes that file: {"base", "loss", "norm", "gradients" and "weights" by HF
    name}.
    """
    actor_config = ActorConfig(
        world_size=case.ranks,
        parallel=ParallelConfig.model_validate(case.parallel),
        packing=case.packing,
        micro_batch_tokens=case.budget,
        recompute=case.recompute,
        logprob_chunk_tokens=_CHUNK_TOKENS,
        **config.actor.model_dump(include=KEPT),
    )
    optimizer = OPTIMIZER.model_copy(update={"distributed": case.distributed})
    groups = make_groups(config, config.seed, Model.of(config).arch)
    model = str(folder / ("neighbor" if case == NEIGHBOR else "model"))
    with joined(
        store, config=actor_config, optimizer=optimizer, model_path=model, device=device
    ) as actor:
        if config.algorithm.uses_reference:
            actor.load_hf(HfFolder(folder / "reference"))
            actor.keep_reference()
        actor.images = partial(pixels, arch=actor.arch)
        weights = actor.trained_weights(load_initial_weights(actor, model))
        if config.actor.lora is not None:
            # with noise: while B is 0, A has no gradient
            initial = InitialAdapters(actor.adapter_specs(), seed=0)
            adapters = enumerate(initial.items())
            actor.load_adapters(
                {name: near(values, 0.05, number) for number, (name, values) in adapters}
            )
            actor.weights_loaded()
        train = config.train.model_copy(update={"num_prompts_per_step": NUM_GROUPS})
        updates = plan_updates(train, config.seed, step=0)
        mine = groups[actor.mesh.dp_rank :: actor.mesh.dp_size]
        layers = actor.routing.layers if actor.routing is not None else None
        needs = LossNeeds(config.algorithm, config.graders_apart)
        batch = build_batch(mine, updates, actor.mesh, routed_layers=layers, needs=needs)
        return _figures(config, actor, weights, batch, folder / "reference.pt", case == REFERENCE)


def _prepared(config: ExperimentConfig, actor: MegatronActor, batch: Batch, base: Tensor) -> Batch:
    """Collective. Returns this rank's share of the batch with everything that the experiment's loss
    needs.

    base: [samples, S] log-probabilities of the one-rank model. Those of the old policy and the
    rollout are base plus noise, enough to reach the clip bounds; the reference model's are
    computed.
    """
    algorithm = config.algorithm
    temperature = config.sampling.temperature
    mesh = actor.mesh
    both = [old := near(base, 0.15, seed=7), near(old, 0.02, seed=8)]
    old, rollout = (t[batch.sample_ids][_inside(batch)] * batch.loss_mask for t in both)
    if config.actor.routing_replay == "old" or algorithm.advantage.needs_squares:
        batch = with_old_logprobs(actor, batch, temperature, squares=True)
    if algorithm.uses_reference:
        batch = with_reference(actor, batch, algorithm.kl.estimator, temperature)
    batch = replace(batch, old_logprobs=old, rollout_logprobs=rollout)
    return with_advantages(batch, algorithm, mesh.reduce, AlgoState(), longest(config))[0]


def _inside(batch: Batch) -> Tensor:
    """Returns the mask of the batch's tokens in [N, MAX_PROMPT + MAX_RESPONSE]."""
    return torch.arange(MAX_PROMPT + MAX_RESPONSE) < batch.lengths[:, None]


def _figures(
    config: ExperimentConfig,
    actor: MegatronActor,
    weights: ActorWeights,
    batch: Batch,
    file: Path,
    is_reference: bool,
) -> CaseFigures:
    """Collective. Makes one update over all samples, then the step's own if it passes over its
    samples several times.

    The reference writes what the other cases compare themselves with, and then is compared with
    itself. The distributed optimizer leaves each rank a shard of the summed gradient: then
    gradients are not compared.
    """
    algorithm = config.algorithm
    temperature = config.sampling.temperature
    mesh = actor.mesh
    reference = {} if is_reference else torch.load(file)
    if is_reference:
        reference["base"] = torch.zeros(len(batch.lengths), MAX_PROMPT + MAX_RESPONSE)
        base = torch.zeros_like(reference["base"])
        base[_inside(batch)] = token_logprobs(actor, batch, temperature)
        reference["base"][batch.sample_ids] = base  # demonstrations, below 0, come last
    batch = _prepared(config, actor, batch, reference["base"])

    def errors(values: Mapping[str, Tensor], name: str) -> dict[str, float]:
        if is_reference:
            reference[name] = whole(weights, values, mesh)
        return ratios(weights, values, reference[name], mesh)

    rows = range(len(batch.lengths))
    denominators = denominators_of(actor, batch, rows, algorithm, longest(config))
    loss = backward(actor, batch, rows, algorithm, temperature, denominators)["loss/total"]
    gradients = {} if actor.config.optimizer.distributed else errors(actor.gradients(), "gradients")
    norm = actor.optimizer_step()["optim/grad_norm"]
    if config.train.num_epochs_per_step > 1:
        update(actor, batch, algorithm, temperature, longest(config))
    moved = errors(actor.trained(), "weights")
    if is_reference:
        reference |= {"loss": loss, "norm": norm}
        torch.save(reference, file)
    # a sum over tokens rounds with the number of its terms
    terms = MAX_RESPONSE if algorithm.aggregation == "seq-mean-token-sum" else 1
    return {
        "loss": loss,
        "loss_error": abs(loss - reference["loss"]) / terms,
        "grad_norm": norm,
        "norm_error": abs(norm / reference["norm"] - 1),
        "gradients": gradients,
        "weights": max(moved.values()),
    }
