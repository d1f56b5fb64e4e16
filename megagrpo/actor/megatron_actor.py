"""The actor: one Megatron-Core model over all trainer ranks, with its optimizer and its
reference."""

import gc
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from megagrpo.actor.host_buffer import HostReference
from megagrpo.actor.megatron_config import checked_kernels, megatron_configs
from megagrpo.actor.optimizer import build_optimizer, draft_norm, take_step, wrap_chunks
from megagrpo.actor.routing.bias import ExpertLoad, RouterBias
from megagrpo.actor.routing.losses import RouterLosses
from megagrpo.actor.routing.replay import RoutingReplay
from megagrpo.actor.routing.tokens import RouterScope
from megagrpo.actor.timing import ScheduleClock
from megagrpo.actor.update_state import UpdateState
from megagrpo.config.schema import ActorConfig, OptimizerConfig
from megagrpo.mesh import Mesh, RunStopped, make_mesh
from megagrpo.models.architecture import Architecture
from megagrpo.models.build import build_chunks, chunk_parameters, load_hf, map_tables, routers
from megagrpo.models.layers import lora
from megagrpo.models.layers.context import make_context_groups
from megagrpo.models.table import model_tensors
from megagrpo.models.tensors import adapter_tensors, layer_prefix
from megagrpo.system import environment
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.copies.recorder import Specs, record_whole


class NonFiniteUpdate(RunStopped):
    """Says that the loss or the gradient norm of an update is NaN or infinite; the weights were not
    touched."""


def start_distributed(config: ActorConfig, device: torch.device) -> Mesh:
    """Joins the torchrun world, cuts it into Megatron's groups, and describes it as a Mesh.

    Raises ValueError on a wrong world size.
    """
    world = environment.get_int("WORLD_SIZE", 1)
    if world != config.world_size:
        raise ValueError(
            f"torchrun started {world} ranks, but actor.world_size is {config.world_size}"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(config.threads)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        deadline = timedelta(seconds=config.deadline_s)
        if environment.under_torchrun():
            dist.init_process_group(backend, timeout=deadline)
        else:
            alone = dist.HashStore()  # type: ignore[attr-defined]  # torch does not declare the export
            dist.init_process_group(backend, timeout=deadline, store=alone, rank=0, world_size=1)
        # one communicator of all ranks, else point-to-point messages make one for every pair
        if device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device))
    make_parallel_groups(config)
    return make_mesh(
        mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size(), device, config.deadline_s
    )


def make_parallel_groups(config: ActorConfig) -> None:
    """Collective. Cuts the world into Megatron's groups, with the ones that it wants on the CPU."""
    p = config.parallel
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=p.etp,
        distributed_timeout_minutes=config.deadline_s / 60,
        create_gloo_process_groups=True,
    )
    make_context_groups(p, timedelta(seconds=config.deadline_s))


def leave_distributed(actor: "MegatronActor | None") -> None:
    """Undoes start_distributed and empties the actor, so that this process may join another
    world."""
    # Its groups' threads would pile up by the thousand. Megatron keeps pieces of the last autograd
    # graph in its modules, and the hooks in that graph keep the modules, which no garbage collector
    # sees through: cut here.
    if actor is not None:
        for wrapper in actor.model:
            vars(wrapper).clear()
        vars(actor).clear()  # its caller holds it while this collects
    mpu.destroy_model_parallel()
    dist.destroy_process_group()
    gc.collect()


def learning_rate(optimizer: OptimizerConfig, update: int, num_updates: int) -> float:
    """Returns the rate of an update, counted from 0.

    It warms up linearly, then stays, or decays linearly or as a cosine to min_lr at the last of
    `num_updates`.
    """
    if update < optimizer.warmup_steps:
        return optimizer.lr * (update + 1) / optimizer.warmup_steps
    if optimizer.lr_schedule == "constant":
        return optimizer.lr
    done = min(
        (update - optimizer.warmup_steps) / max(num_updates - 1 - optimizer.warmup_steps, 1), 1.0
    )
    left = 1 - done if optimizer.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * left


class MegatronActor:
    """Trains one model over all ranks; weights are uninitialized until `load_hf` or a checkpoint
    was read."""

    def __init__(
        self,
        *,
        arch: Architecture,
        config: ActorConfig,
        num_updates: int,
        seed: int,
        device: torch.device,
    ):
        """Collective. `device` is prepare_host()'s; `num_updates` is where the learning-rate
        schedule ends.

        Raises ValueError for a layout that cannot be computed, and for ranks with other layers.
        """
        self.arch = arch
        kernels = checked_kernels(arch, config)
        self.config = config
        self.transformer, ddp_settings, optimizer_settings = megatron_configs(arch, config, kernels)
        self.mesh = start_distributed(config, device)
        engines = self.mesh.gather_world(kernels.transformer_engine)
        if len(set(engines)) > 1:
            raise ValueError(
                f"rank {engines.index(False)} has no Transformer Engine and rank {engines.index(True)} has: "
                "their experts would lie in memory in another order. Install it everywhere (its log says "
                "why it is not used), or set actor.transformer_engine: false"
            )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self.num_updates = num_updates
        self.chunks = build_chunks(arch, config, self.transformer, kernels, device)
        if config.lora is not None:
            self.load_adapters(lora.InitialAdapters(self.adapter_specs(), seed))
        # after the model is built: Megatron's experts copy the configuration deeply, and process
        # groups cannot be copied
        self.clock = ScheduleClock(device)
        self.transformer.timers = self.clock
        self.transformer.finalize_model_grads_func = self._reduce_gradients
        self.model = wrap_chunks(self.chunks, self.transformer, ddp_settings)
        self.optimizer = build_optimizer(self.model, optimizer_settings, config.lora is not None)
        self.update_state = UpdateState(self.model, self.optimizer, device)
        # whether parameters of other ranks lag behind this rank's own shards
        self._to_gather = False
        self.updates_done = 0
        # set by keep_reference
        self.as_reference: Callable[[], AbstractContextManager[None]] | None = None
        self._reference: HostReference | None = None
        found = routers(self.chunks)
        self.router_scope = scope = RouterScope(found)
        self.expert_load = ExpertLoad(found, scope, arch, device)
        self.router_bias = (
            None if config.router_bias_update is None else RouterBias(found, scope, arch, device)
        )
        self.router_losses = (
            None
            if config.router_losses is None
            else RouterLosses(found, scope, arch, config.router_losses, device)
        )
        self.routing = (
            None if config.routing_replay is None else RoutingReplay(found, scope, arch, device)
        )
        # pixels [patches, values] of an image by its key
        self.images: Callable[[str], Tensor] | None = None

    @property
    def on_last_stage(self) -> bool:
        """Returns whether this rank's pipeline stage computes losses."""
        return bool(mpu.is_pipeline_last_stage(ignore_virtual=True))

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Returns the layers of this rank whose experts are replayed, as RoutingReplay.layers; ()
        without replay."""
        return () if self.routing is None else self.routing.layers

    def bring_embedding(self) -> None:
        """Collective. Copies the input embedding to the draft if that is on another pipeline stage,
        and not tied."""
        if self.config.parallel.pp == 1 or self.arch.tied:
            return
        self.gather_parameters()
        first, last = self.chunks[0], self.chunks[-1]
        group = mpu.get_pipeline_model_parallel_group()
        ranks = dist.get_process_group_ranks(group)
        if first.pre_process:
            dist.send(first.embedding.word_embeddings.weight.data, ranks[-1], group=group)
        if last.draft is not None:
            if last.draft.embedding is None:
                last.draft.embedding = torch.empty_like(last.output_weight().data)
            dist.recv(last.draft.embedding, ranks[0], group=group)

    def _reduce_gradients(self, model: list, num_tokens: Tensor | None = None, **groups) -> None:
        """Collective. Sums gradients over ranks as Megatron does, without its token count.

        The loss is divided by its global denominator already.
        """
        self.clock.gradients_done()
        lora.sum_expert_replicas(self.chunks)
        finalize_model_grads(model, None, **groups)

    def load_hf(self, hf: Mapping[str, Tensor]) -> None:
        """Copies this rank's slices of an HF model into the parameters (recordable: nothing but
        slices and copies)."""
        load_hf(self.chunks, self.arch, hf)

    def map_tables(self, hf: Mapping[str, Tensor]) -> None:
        """Lets layers read what stays in the files of an HF model."""
        map_tables(self.chunks, self.arch, hf)

    def weights_loaded(self) -> None:
        """Tells the optimizer that the parameters were written from outside."""
        self.optimizer.reload_model_params()

    def keep_reference(self) -> None:
        """Lets the model inside `as_reference()` be what it is now; with adapters it is the model
        without them."""
        if self.config.lora is not None:
            self.as_reference = partial(lora.adapters_off, self.chunks)
        elif self._reference is None:
            self._reference = HostReference(self.parameters())
            self.as_reference = self._reference.swapped_in
        else:
            self._reference.take()

    def parameters(self) -> dict[str, Tensor]:
        """Returns this rank's live parameters of the HF model by a name that is unique on this
        rank."""
        return chunk_parameters(self.chunks)

    def trained(self) -> dict[str, Tensor]:
        """Returns the trainable tensors of this rank (only the adapters under LoRA)."""
        if self.config.lora is not None:
            return chunk_parameters(self.chunks, adapters=True)
        return {name: tensor for name, tensor in self.parameters().items() if tensor.requires_grad}

    def merged(self) -> AbstractContextManager[None]:
        """Lets `parameters` be what is published inside: with adapters, their product is added to
        the weights."""
        return nullcontext() if self.config.lora is None else lora.merged(self.chunks)

    def adapter_specs(self) -> Specs:
        """Returns names and shapes of the whole model's adapters, {} where all weights are
        trained."""
        if self.config.lora is None:
            return {}
        found = adapter_tensors(
            model_tensors(self.arch), self.config.lora.targets, self.config.lora.rank
        )
        return {spec.name: (spec.shape, self.transformer.params_dtype) for spec in found}

    def load_adapters(self, whole: Mapping[str, Tensor]) -> None:
        """Copies this rank's slices of whole adapters (adapter_specs' names) into its own
        (recordable)."""
        lora.load_adapters(self.chunks, whole)

    def trained_weights(self, weights: ActorWeights) -> ActorWeights:
        """Returns where the tensors with gradients lie: `weights` of the HF model without biases of
        routers and what is frozen of a vision tower, or the adapters of any slices.
        """
        if self.config.lora is None:
            vision = self.arch.vision
            # a draft's tensors
            frozen = () if self.config.trains_draft else (layer_prefix(self.arch.num_layers),)
            untrained = {
                spec.name
                for spec in model_tensors(self.arch)
                if not (
                    spec.trained
                    and (vision is None or vision.trains(spec.name, self.config.trained_vision))
                )
                or spec.name.startswith(frozen)
            }
            copies = [copy for copy in weights.copies if copy.hf not in untrained]
            kept = {name: spec for name, spec in weights.hf_specs.items() if name not in untrained}
            return ActorWeights(copies, kept, self.trained)
        specs = self.adapter_specs()
        return ActorWeights(
            record_whole(self.load_adapters, specs, self.trained()).copies, specs, self.trained
        )

    def zero_grad(self) -> None:
        """Clears gradients before a backward, whose state comes back first if it is away."""
        self.update_state.bring_back()
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.router_bias is not None:
            self.router_bias.begin()

    def gradients(self) -> dict[str, Tensor]:
        """Returns this rank's accumulated float32 gradients by parameter name; the certificate
        compares them."""
        return {name: p.main_grad for name, p in self.trained().items()}  # type: ignore[attr-defined]  # by Megatron

    def gather_parameters(self) -> None:
        """Collective. Makes the parameters whole on every rank after an update that left it to the
        next forward."""
        if self._to_gather:
            for wrapper in self.model:
                wrapper.start_param_sync(force_sync=True)
            self._to_gather = False

    def optimizer_step(self, loss: float = 0.0, followed: bool = False) -> dict[str, float]:
        """Collective. Clips by the global norm and steps if the norm and the update's `loss` are
        finite.

        followed: another update follows, whose forward gathers the parameters under
        overlap_param_gather; do not read them before it or `gather_parameters`. Raises
        NonFiniteUpdate on every rank, before any weight changes, if the norm or the loss is not
        finite.
        """
        self.optimizer.prepare_grads()
        norms = {"optim/grad_norm": float(self.optimizer.get_grad_norm())}
        if self.config.trains_draft:
            norms["optim/draft_grad_norm"] = draft_norm(self.optimizer)
        # one decision for all ranks: a rank that steps while another does not would leave the
        # weights of no version
        if not self.mesh.all_true(all(map(math.isfinite, (loss, *norms.values())))):
            raise NonFiniteUpdate(
                f"update {self.updates_done}: loss {loss}, {norms}; no weight was changed"
            )
        lr = learning_rate(self.config.optimizer, self.updates_done, self.num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            # Megatron leaves it to its own scheduler to spare norms and biases
            group["weight_decay"] = self.config.optimizer.weight_decay * group.get("wd_mult", 1.0)
        take_step(self.optimizer, *norms.values())
        self._to_gather = self.model[0].ddp_config.overlap_param_gather
        if not followed:
            self.gather_parameters()
        if self.router_bias and (rate := self.config.router_bias_update):
            self.router_bias.move(rate)
        self.updates_done += 1
        return {**norms, "optim/lr": lr}
