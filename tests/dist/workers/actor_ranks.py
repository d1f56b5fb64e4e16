"""One rank of the actor's tests: every job of jobs.json in a world of its own layout.

A job does one thing of JOBS, or several, one after the other, whose results are by their names.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import serialization
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megagrpo.actor import step
from megagrpo.actor.megatron_actor import MegatronActor
from megagrpo.actor.saving import load_actor, save_actor
from megagrpo.batching.updates import one_pass
from megagrpo.checkpoint import save as checkpoint
from megagrpo.checkpoint.save import RunIdentity
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.config.schema import ActorConfig, CheckpointConfig, ParallelConfig
from megagrpo.tools.certify.measure import ratios, whole
from megagrpo.tools.certify.synthetic import near
from megagrpo.tools.ranks.peft_folder import export_peft
from megagrpo.types import Batch, TrainState
from megagrpo.weights.actor_weights import ActorWeights, load_initial_weights
from megagrpo.weights.hf_export import export_hf
from megagrpo.weights.hf_folder import HfFolder
from tests.dist.workers.harness import near_initial, over_ranks, weights_unreadable, with_actors
from tests.dist.workers.held import gradient_buffers, offload, optimizer_state
from tests.dist.workers.recorded import recorded_logits
from tests.dist.workers.samples import NUM_SAMPLES, VOCAB, samples
from tests.experiments import experiment
from tests.padding import batch_of_rows, flat

# what hf_reference.py computes
PLAIN = AlgorithmConfig.model_validate({"loss": {"name": "gpg"}, "aggregation": "token-mean"})
RICH = AlgorithmConfig.model_validate(
    {"kl": {"loss_coef": 0.1}, "entropy_coef": 0.01, "aggregation": "seq-mean-token-mean", "loss": {"name": "ppo_clip"}}
)


def batch_of(mesh, shift: int = 0, keep: int = NUM_SAMPLES) -> Batch:
    """This rank's share of the first `keep` samples; `shift` makes other tokens, for updates that differ."""
    s = samples()
    mine = torch.tensor([i for i in range(keep) if i % mesh.dp_size == mesh.dp_rank], dtype=torch.int64)
    near = (0.2 * s["noise"] - 6.0) * s["mask"]
    inside = torch.arange(s["tokens"].shape[1]) < s["lengths"][:, None]
    return batch_of_rows(
        sample_ids=mine,
        group_ids=mine,
        num_groups=NUM_SAMPLES,
        tokens=((s["tokens"] + shift) % VOCAB * inside)[mine],
        lengths=s["lengths"][mine],
        prompt_lengths=s["prompts"][mine],
        loss_mask=s["mask"][mine],
        rollout_logprobs=near[mine],
        rewards=torch.zeros(len(mine), dtype=torch.float64),
        valid=torch.ones(len(mine), dtype=torch.bool),
        truncated=torch.zeros(len(mine), dtype=torch.bool),
        advantages=s["advantages"][mine],
        old_logprobs=near[mine],
        ref_logprobs=near[mine] * 1.02,
        updates=one_pass(NUM_SAMPLES),
    )


def gradient(actor: MegatronActor, batch: Batch, algorithm: AlgorithmConfig, seen: torch.Tensor | None = None) -> float:
    rows = range(len(batch.lengths))
    denominators = step.denominators_of(actor, batch, rows, algorithm, 32)
    return step.backward(actor, batch, rows, algorithm, 1.0, denominators, seen)["loss/total"]


@contextmanager
def next_floats(actor: MegatronActor) -> Iterator[None]:
    """Inside, each parameter has the next float32, above or below at random."""
    kept = {name: p.detach().clone() for name, p in actor.parameters().items()}
    with torch.no_grad():
        for number, p in enumerate(actor.parameters().values()):
            if p.is_floating_point():  # not a table of experts
                p.copy_(torch.nextafter(p.cpu(), near(p.cpu(), 1.0, number)))
    yield
    with torch.no_grad():
        for name, p in actor.parameters().items():
            p.copy_(kept[name])


def forward_job(actor: MegatronActor, weights: ActorWeights, job: dict, folder: Path) -> dict:
    """Against transformers: logits of every predicting position, log-probabilities, gradients; export, bit by bit."""
    truth = torch.load(f"{job['model']}.pt", map_location="cpu")
    batch = batch_of(actor.mesh)
    everything = torch.ones_like(batch.loss_mask)
    everything[batch.starts] = False
    whole_rows = Batch(**{**vars(batch), "loss_mask": everything})
    with recorded_logits() as seen, torch.no_grad():
        logprobs = step.token_logprobs(actor, whole_rows, 1.0)
    error, positions = 0.0, 0
    for rows, columns, logits in seen:
        expected = truth["logits"][batch.sample_ids[rows], columns - 1]
        error = max(error, float((logits - expected).abs().max())) if len(rows) else error
        positions += len(rows)
    rows = samples()["tokens"][batch.sample_ids]
    expected = truth["logits"][batch.sample_ids].log_softmax(-1)[:, :-1].gather(2, rows[:, 1:, None]).squeeze(2)
    expected = torch.nn.functional.pad(expected, (1, 0))
    logprob_error = float(((logprobs - flat(expected, batch.lengths)) * everything).abs().max())
    of_update = torch.full_like(logprobs, torch.nan)
    loss = gradient(actor, batch, PLAIN, of_update)
    records = step.holds_token_values()  # one rank of a replica
    assert sum(actor.mesh.gather_world(records)) == actor.mesh.dp_size
    seen_error = (of_update - logprobs)[batch.loss_mask].abs().max() if records else 0.0
    result = {
        "logits": error,
        "positions": positions,
        "logprobs": logprob_error,
        "seen_logprobs": float(seen_error) if math.isfinite(seen_error) else math.inf,  # a maximum would drop NaN
        "loss": abs(loss - truth["loss"]),
        "gradients": ratios(
            actor.trained_weights(weights), actor.gradients(), HfFolder(job["model"] + ".gradients"), actor.mesh
        ),
    }
    if Path(job.get("reference", "")).is_file():
        result["rounding"] = torch.load(job["reference"], map_location="cpu")["rounding"]
    return result | exported(actor, weights, job, folder)


def config_of(actor: MegatronActor, job: dict, dtype: str = "float32"):
    """An experiment that exports this actor in a dtype."""
    config = experiment(model={"path": job["model"]})
    return config.model_copy(update={"actor": actor.config.model_copy(update={"dtype": dtype})})


def exported(actor: MegatronActor, weights: ActorWeights, job: dict, folder: Path) -> dict:
    """Whether the export of untrained weights is the folder that was loaded, bit by bit."""
    export_hf(folder / "exported", weights, actor.mesh, config_of(actor, job), job["model"])
    if not actor.mesh.is_main:
        return {}
    written, source = HfFolder(folder / "exported"), HfFolder(job["model"])
    same = (torch.equal(written[name].view(torch.int32), source[name].view(torch.int32)) for name in source)
    return {"export": written.keys() == source.keys() and all(same)}


def layout_job(actor: MegatronActor, weights: ActorWeights, job: dict, folder: Path) -> dict:
    """The rich loss against one rank: loss, gradients, gradient norm, weights after one update.

    The reference job writes the file.
    """
    calls = count_mlp_calls(actor)
    weights = actor.trained_weights(weights)
    batch = batch_of(actor.mesh, keep=job.get("keep", NUM_SAMPLES))
    logprobs, of_neighbor = (torch.full((len(batch.tokens),), torch.nan) for _ in range(2))
    if job.get("write"):
        with next_floats(actor):
            gradient(actor, batch, RICH, of_neighbor)
            neighbors = whole(weights, actor.gradients(), actor.mesh)
    loss = gradient(actor, batch, RICH, logprobs)
    values = None if job.get("distributed") else actor.gradients()
    if job.get("write"):
        state = {
            "loss": loss,
            "gradients": whole(weights, values, actor.mesh),
            "rounding": {
                "gradient": max(ratios(weights, values, neighbors, actor.mesh).values()),
                "logprobs": float((logprobs - of_neighbor).abs().max()),
            },
            **actor.optimizer_step(),
        }
        torch.save({**state, "weights": whole(weights, actor.trained(), actor.mesh)}, job["reference"])
        return {}
    reference = torch.load(job["reference"], map_location="cpu")
    gradients = ratios(weights, values, reference["gradients"], actor.mesh) if values is not None else {}
    norm = actor.optimizer_step()["optim/grad_norm"]
    return {
        "loss": abs(loss - reference["loss"]),
        "gradients": gradients,
        "rounding": reference["rounding"],
        "norm": abs(norm / reference["optim/grad_norm"] - 1),
        "weights": difference(whole(weights, actor.trained(), actor.mesh), reference["weights"]),
        "mlp_calls": len(calls),
        "gradient_bytes": sum(buffer.grad_data.nbytes for buffer in gradient_buffers(actor)),
        "state_bytes": sum(values.nbytes for values in optimizer_state(actor)),
    }


def two_updates_job(actor: MegatronActor, weights: ActorWeights, job: dict, folder: Path) -> dict:
    """Two updates, the second's forward right behind the first's step; do replicas hold the same parameters then?"""
    trained, norms = actor.trained_weights(weights), []
    for number in range(2):
        loss = gradient(actor, batch_of(actor.mesh, shift=number), RICH)
        norms.append([loss, actor.optimizer_step(loss, followed=True)["optim/grad_norm"]])
    actor.gather_parameters()
    replicas = mpu.get_data_parallel_group()
    own = {name: values.cpu() for name, values in actor.parameters().items()}
    everyone = [None] * replicas.size()
    dist.all_gather_object(everyone, own, group=replicas)
    kept = {"norms": norms, "weights": whole(trained, actor.trained(), actor.mesh)}
    torch.save(kept, f"{job['kept']}{actor.mesh.rank}")
    ddp = actor.model[0].ddp_config
    return {
        "same_on_replicas": all(torch.equal(p, other[name]) for other in everyone for name, p in own.items()),
        "overlaps": [ddp.overlap_grad_reduce, ddp.overlap_param_gather],
        "buckets": sum(len(group.buckets) for wrapper in actor.model for group in wrapper.bucket_groups),
    }


def adapters_job(actor: MegatronActor, weights: ActorWeights, job: dict, folder: Path) -> dict:
    """What peft_reference.py compares: logits with adapters, their gradients, both exports; merging leaves no trace."""
    batch, out = batch_of(actor.mesh), Path(job["out"])
    with recorded_logits() as seen, torch.no_grad():
        on = step.token_logprobs(actor, batch, 1.0)
    before = {name: p.detach().clone() for name, p in actor.parameters().items()}
    adapters = actor.trained_weights(weights)
    with next_floats(actor):
        with recorded_logits() as of_neighbor, torch.no_grad():
            step.token_logprobs(actor, batch, 1.0)
        gradient(actor, batch, PLAIN)
        neighbors = whole(adapters, actor.gradients(), actor.mesh)
    with actor.merged(), torch.no_grad():
        merged = step.token_logprobs(actor, batch, 1.0)
        changed = sum(not torch.equal(p, before[name]) for name, p in actor.parameters().items())
    actor.keep_reference()
    off = step.with_reference(actor, batch, "k3", 1.0).ref_logprobs
    loss = gradient(actor, batch, PLAIN)
    rounding = max(ratios(adapters, actor.gradients(), neighbors, actor.mesh).values())
    gradients = whole(adapters, actor.gradients(), actor.mesh)
    export_hf(out / "merged", weights, actor.mesh, config_of(actor, job), job["model"])
    export_peft(out / "peft", adapters, actor.mesh, config_of(actor, job))
    state = {"logits": list(seen), "loss": loss, "gradients": gradients}
    torch.save(state | {"adapters": whole(adapters, actor.trained(), actor.mesh)}, out / "actor.pt")
    pairs = zip(seen, of_neighbor, strict=True)
    moved = max(float((one[2] - other[2]).abs().max()) for one, other in pairs)
    return {
        "rounding": {"gradient": rounding, "logits": moved},
        "merged": float((on - merged).abs().max()),
        "moved": float((on - off).abs().max()),
        "changed": changed,
        "restored": all(torch.equal(p, before[name]) for name, p in actor.parameters().items()),
    }


def count_mlp_calls(actor: MegatronActor) -> list:
    """Grows by one whenever the router or the MLP of a layer computes, in the forward or again in the backward."""
    calls: list = []
    for chunk in actor.chunks:
        for layer in chunk.decoder.layers:
            getattr(layer.mlp, "router", layer.mlp).register_forward_hook(lambda *_: calls.append(1))
    return calls


def difference(found: dict, expected: dict) -> float:
    """Largest absolute difference; on ranks other than the main one `found` is empty and this 0."""
    return max((float((found[name].cpu() - expected[name]).abs().max()) for name in found), default=0.0)


def save(actor: MegatronActor, job: dict, root: str, reshardable: bool = True) -> Path:
    """Writes a checkpoint at once."""
    state = TrainState(step=job.get("step", 1), data_cursor=17)
    return checkpoint.PendingSave(
        Path(root),
        state,
        identity(job),
        CheckpointConfig(keep=2),
        lambda f: save_actor(actor, f, reshardable),
        actor.mesh,
    ).finish()


def checkpoint_job(actor: MegatronActor, weights: ActorWeights, job: dict, folder: Path) -> dict:
    """[load] -> `warm` updates -> [away] -> [save] -> two more, [away] in between; job["then"] gets
    what they give."""
    weights = actor.trained_weights(weights)
    if "load" in job:
        state = checkpoint.load(Path(job["load"]), identity(job), lambda f: load_actor(actor, f), actor.mesh)
        assert state.data_cursor == 17
    warm = job.get("warm", 0)
    for number in range(warm):
        gradient(actor, batch_of(actor.mesh, shift=number), RICH)
        actor.optimizer_step()
    if job.get("away"):
        offload(actor)
    torch.rand(warm)  # the saved RNG state is not that of a fresh start
    saved = save(actor, job, job["save"]) if "save" in job else None
    if "save_own_parts" in job:
        save(actor, job, job["save_own_parts"], reshardable=False)
    after = {"updates_done": actor.updates_done, "rng": {"torch": torch.get_rng_state()}}
    for number in (10, 11):
        after[f"loss{number}"] = gradient(actor, batch_of(actor.mesh, shift=number), RICH)
        if not job.get("distributed"):
            after[f"gradients{number}"] = whole(weights, actor.gradients(), actor.mesh)
        after[f"norm{number}"] = actor.optimizer_step()["optim/grad_norm"]
        after[f"weights{number}"] = whole(weights, actor.trained(), actor.mesh)
        if job.get("away"):
            offload(actor)
    if actor.mesh.is_main:
        torch.save(after, job["then"])
    return {"saved": str(saved)}


def refusal_job(actor: MegatronActor, weights: ActorWeights, job: dict, folder: Path) -> dict:
    """Loading or saving must fail with one message on every rank and leave weights as they are."""
    before = {name: p.detach().clone() for name, p in actor.parameters().items()}
    message = ""
    try:
        if "save" in job:
            with FULL[job["full"]]() if "full" in job else nullcontext():
                save(actor, job, job["save"])
        else:
            checkpoint.load(Path(job["load"]), identity(job), lambda f: load_actor(actor, f), actor.mesh)
    except (ValueError, RuntimeError) as exc:
        message = str(exc)
    messages: list = [None] * actor.mesh.world_size
    dist.all_gather_object(messages, message)
    untouched = all(torch.equal(p, before[name]) for name, p in actor.parameters().items())
    initial = [p.detach().clone() for p in actor.trained().values()]
    own, twin = (weights_alone(actor, job, job[source]) for source in ("load", "twin")) if "twin" in job else ([], [])
    return {
        "messages": messages,
        "untouched": untouched,
        "alone": all(map(torch.equal, own, twin)) and not all(map(torch.equal, own, initial)),
    }


def weights_alone(actor: MegatronActor, job: dict, folder: str) -> list[torch.Tensor]:
    """What an export loads of a checkpoint, whatever its layout."""
    any_layout = replace(identity(job), layout={})
    checkpoint.load(Path(folder), any_layout, lambda f: load_actor(actor, f, with_optimizer=False), actor.mesh)
    return [p.detach().clone() for p in actor.trained().values()]


def disk_full(*args):
    if dist.get_rank() == 0:
        raise OSError(28, "No space left on device")


# what only the main rank writes, by Megatron's file
FULL = {
    ".metadata": lambda: patch.object(FileSystemWriter, "finish", disk_full),
    "metadata.json": lambda: patch.object(serialization, "save_config", disk_full),
}


def identity(job: dict) -> RunIdentity:
    layout = ActorConfig(world_size=int(os.environ["WORLD_SIZE"]), parallel=ParallelConfig(**job.get("parallel", {})))
    return RunIdentity(job.get("identity", {"model": Path(job["model"]).name}), layout.layout)


def biases_job(actor: MegatronActor, weights: ActorWeights, job: dict, folder: Path) -> dict:
    """Biases of routers after a step: dtype, whether they are bit by bit the folder's, what else keeps account of them.

    And the load of experts, of which layers without any have no part.
    """
    actor.expert_load.begin()
    gradient(actor, batch_of(actor.mesh), RICH)
    actor.optimizer_step()
    counts = actor.expert_load.counts.clone()
    dist.all_reduce(counts)
    imbalance = step._expert_metrics(actor)["moe/load_imbalance"]
    busy = counts[counts.sum(1) > 0].double()
    hf, live = HfFolder(job["model"]), actor.parameters()
    biases = {copy.hf: copy.view(live) for copy in weights.copies if copy.hf.endswith("e_score_correction_bias")}
    trained = actor.trained_weights(weights)
    return {
        "float32": all(bias.dtype == torch.float32 for bias in biases.values()),
        "unmoved": all(torch.equal(bias, hf[name]) for name, bias in biases.items()),
        "layers": sorted(int(name.split(".")[2]) for name in biases),
        "trained": sorted(biases.keys() & ({copy.hf for copy in trained.copies} | trained.hf_specs.keys())),
        "busy": len(busy),
        "imbalance_off": abs(imbalance - float((busy.amax(1) / busy.mean(1)).mean())),
    }


def decays_job(actor: MegatronActor, weights: ActorWeights, job: dict, folder: Path) -> dict:
    """Decays of gated delta nets before and after a step of a model in another dtype, live and exported."""
    hf = HfFolder(job["model"])
    live = actor.parameters()
    read = {copy.hf: copy.view(live).clone() for copy in weights.copies if copy.hf in weights.fixed_dtypes}
    equal = all(
        torch.equal(values, hf[copy.hf][copy.start[0] : copy.start[0] + copy.size[0]])
        for copy in weights.copies
        if (values := read.get(copy.hf)) is not None
    )
    gradient(actor, batch_of(actor.mesh), RICH)
    actor.optimizer_step()
    moved = [not torch.equal(copy.view(live), read[copy.hf]) for copy in weights.copies if copy.hf in read]
    export_hf(folder / "exported", weights, actor.mesh, config_of(actor, job, job["dtype"]), job["model"])
    exported = HfFolder(folder / "exported").specs if actor.mesh.is_main else {}
    return {
        "names": sorted(read),
        "equal": equal,
        "moved": all(moved),
        "live": sorted({str(values.dtype) for values in read.values()}),
        "exported": sorted({str(dtype) for name, (_, dtype) in exported.items() if name in read}),
        "others": sorted({str(d) for name, (_, d) in exported.items() if name not in weights.fixed_dtypes}),
    }


JOBS = {
    "forward": forward_job, "layout": layout_job, "two_updates": two_updates_job, "checkpoint": checkpoint_job,
    "refusal": refusal_job, "adapters": adapters_job, "biases": biases_job, "decays": decays_job, "export": exported,
}  # fmt: skip


def main(folder: Path) -> None:
    def measure(actor: MegatronActor, job: dict) -> dict:
        overwritten = "load" in job and "lora" not in job
        with weights_unreadable() if overwritten else nullcontext():  # a resume does without them
            weights = load_initial_weights(actor, job["model"], overwritten)
        if "lora" in job and "load" not in job:
            actor.load_adapters(near_initial(actor))
            actor.weights_loaded()
        if isinstance(job["do"], str):
            return JOBS[job["do"]](actor, weights, job, folder)
        return {do: over_ranks(actor, JOBS[do](actor, weights, job, folder)) for do in job["do"]}

    with_actors(folder, measure)
