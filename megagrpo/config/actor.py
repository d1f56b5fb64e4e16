"""The `actor` section: layout, kernels, dtype and optimizer of the learner."""

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from megagrpo.config.fields import (
    Dtype,
    Fraction,
    LibrarySettings,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Processes,
    Rule,
    Seconds,
    Section,
)


class ParallelConfig(Section):
    """Megatron's layout: world_size / (tp pp cp) ranks are data-parallel; sequence parallelism is
    on when tp > 1."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    pp: PositiveInt = 1
    """Pipeline stages."""
    vpp: PositiveInt = 1
    """Virtual stages of each rank; more than 1 needs pp > 1."""
    cp: PositiveInt = 1
    """Context-parallel ranks, which share one sequence."""
    ep: PositiveInt = 1
    """Expert-parallel ranks."""
    etp: PositiveInt = 1
    """Tensor-parallel ranks of each expert."""
    first_stage_layers: PositiveInt | None = None
    """Layers of that pipeline stage; default: stages that are not given are equal."""
    last_stage_layers: PositiveInt | None = None
    """Layers of that pipeline stage; default: stages that are not given are equal."""

    def problems(self) -> list[Rule]:
        one_stage = "needs pp > 1: without a pipeline one stage has all layers"
        return [
            Rule(
                self.vpp > 1 and self.pp == 1,
                f"vpp {self.vpp} needs pp > 1: virtual stages share the ranks of a pipeline",
                "raise pp, or remove vpp",
            ),
            Rule(
                self.first_stage_layers and self.pp == 1,
                f"first_stage_layers {self.first_stage_layers} {one_stage}",
                "raise pp, or remove it",
            ),
            Rule(
                self.last_stage_layers and self.pp == 1,
                f"last_stage_layers {self.last_stage_layers} {one_stage}",
                "raise pp, or remove it",
            ),
        ]

    def stage_layers(self, num_layers: int) -> list[int]:
        """Returns the number of layers of each pipeline stage.

        Raises ValueError saying why `num_layers` cannot be cut like this.
        """
        given = [n for n in (self.first_stage_layers, self.last_stage_layers) if n is not None]
        middle = self.pp - len(given)
        left = num_layers - sum(given)
        if (left > 0) != (middle > 0) or left < 0 or (middle and left % middle):
            rest = (
                f" less first_stage_layers and last_stage_layers, {sum(given)} together,"
                if given
                else ""
            )
            raise ValueError(
                f"num_hidden_layers = {num_layers}{rest} cannot be cut into {middle} equal stages"
            )
        stages = [self.first_stage_layers] if self.first_stage_layers else []
        stages += [left // middle] * middle if middle else []
        stages += [self.last_stage_layers] if self.last_stage_layers else []
        uneven = [n for n in stages if n % self.vpp]
        if uneven:
            raise ValueError(
                f"a stage of {uneven[0]} layers does not divide into vpp = "
                f"{self.vpp} virtual stages"
            )
        return stages


class OptimizerConfig(Section):
    """Adam with decoupled weight decay."""

    lr: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """Learning rate after the warm-up."""
    min_lr: Fraction = 0.0
    """Learning rate at the last update, if the schedule decays."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or decaying to `min_lr`."""
    warmup_steps: NonNegativeInt = 0
    """Updates of linear warm-up."""
    weight_decay: Fraction = 0.0
    """Norms and biases are spared."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of Adam's second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0: no clipping."""
    distributed: bool = True
    """Shard the optimizer's state over data-parallel ranks."""
    megatron: LibrarySettings = Field(default={})
    """Fields of Megatron's OptimizerConfig, such as `optimizer_cpu_offload: true`."""

    def problems(self) -> list[Rule]:
        return [
            Rule(
                self.min_lr > self.lr,
                f"min_lr {self.min_lr:g} is above lr {self.lr:g}",
                "lower it",
            ),
        ]


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Section):
    """Low-rank adapters instead of all weights: y = W x + alpha / rank * B (A x), W frozen."""

    rank: PositiveInt = 16
    """Rows of A, columns of B."""
    alpha: PositiveFloat = 32.0
    """Adapters are multiplied by alpha / rank."""
    targets: list[Projection] = Field(default=list(get_args(Projection)), min_length=1)
    """Projections with adapters; of a model with experts, its experts'."""

    @field_validator("targets")
    @classmethod
    def _each_once(cls, targets: list[Projection]) -> list[Projection]:
        if twice := sorted({name for name in targets if targets.count(name) > 1}):
            raise ValueError(f"names {', '.join(twice)} twice")
        return targets

    @property
    def scale(self) -> float:
        """Returns the factor of B (A x)."""
        return self.alpha / self.rank


class VisionConfig(Section):
    """The vision tower of a vision-language model; by default all of it is trained."""

    train: Literal["none", "projector", "all"] = "all"
    """What is trained; projector: the mergers that make features of patches."""


class DraftConfig(Section):
    """Load, train, publish and export the model's multi-token-prediction layer, which proposes
    tokens to engines (`rollout.draft_tokens`)."""

    train: bool = True
    """In every update towards the policy's distribution of the token after next, on detached
    inputs: the policy's gradients do not change."""


class RouterLossConfig(Section):
    """Auxiliary losses of routers, over real tokens, divided by counts of the whole update on all
    ranks."""

    balance: NonNegativeFloat = 0.0
    """Coefficient of DeepSeek-V3's balance loss of single sequences (1 is balanced), the mean over
    the update's samples, summed over layers; it took 0.0001."""
    z: NonNegativeFloat = 0.0
    """Coefficient of the z-loss: squared log-sum-exp of a token's router logits, the mean over the
    update's tokens, summed over layers; ST-MoE took 0.001."""

    def problems(self) -> list[Rule]:
        return [
            Rule(
                not self.balance and (not self.z),
                "balance and z are both 0",
                "set one, or remove router_losses",
            ),
        ]


class ActorConfig(Section):
    """The Megatron-Core learner."""

    world_size: PositiveInt = 1
    """Trainer ranks over all nodes."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: CUDA if a GPU is visible, else the CPU, and then bfloat16 is refused."""
    dtype: Dtype = "float32"
    """Of weights and activations; sums and optimizer state are float32."""
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    vision: VisionConfig | None = None
    draft: DraftConfig | None = None
    router_bias_update: PositiveFloat | None = None
    """Move routers' biases by this after an update, up for experts with fewer tokens than the mean:
    DeepSeek-V3's balance, which took 0.001. Default: biases stay."""
    router_losses: RouterLossConfig | None = None
    routing_replay: Literal["rollout", "old"] | None = None
    """Experts that the actor's forwards take as given, with weights from its own routers: the
    engine's (rollout; R3, arXiv 2510.11370), or those of the log-probabilities before a step's
    first update (old; R2, arXiv 2507.18071). The reference routes for itself. Default: routers
    choose."""
    micro_batch_tokens: PositiveInt = 4096
    """Most tokens of a forward pass, padding included."""
    packing: bool = True
    """Several sequences in one row, without padding."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass: none, those of `megatron.recompute_modules`, or
    all, layer by layer."""
    transformer_engine: Literal["auto"] | bool = "auto"
    """Its layers, attention and grouped experts; auto: on CUDA if installed, but not for `lora`,
    whose adapters need Megatron's layers, or float32, which it multiplies as TF32."""
    megatron: LibrarySettings = Field(default={})
    """Fields of Megatron's TransformerConfig, such as `moe_permute_fusion: true`; see [what is
    refused](#settings-of-libraries-that-are-refused)."""
    ddp: LibrarySettings = Field(default={})
    """Fields of Megatron's DistributedDataParallelConfig, such as `bucket_size: 40000000`."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at once, a block of [chunk, vocab / tp]."""
    threads: Processes = 1
    """Threads of a rank's operators on a CPU."""
    deadline_s: Seconds = 1800.0
    """Longest wait in a collective."""
    max_restarts: NonNegativeInt = 3
    """Restarts of all ranks over the run, from the last checkpoint, because one was lost."""

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks."""
        return self.world_size // (self.parallel.tp * self.parallel.pp * self.parallel.cp)

    @property
    def adapters(self) -> tuple[tuple[str, ...], int] | None:
        """Targets and rank of the adapters."""
        return None if self.lora is None else (tuple(self.lora.targets), self.lora.rank)

    @property
    def has_draft(self) -> bool:
        """Returns whether the multi-token-prediction layer is part of the model."""
        return self.draft is not None

    @property
    def trains_draft(self) -> bool:
        """Returns whether updates train it."""
        return self.draft is not None and self.draft.train

    @property
    def trained_vision(self) -> Literal["none", "projector", "all"]:
        """What of a vision tower is trained."""
        return "all" if self.vision is None else self.vision.train

    @property
    def expects_transformer_engine(self) -> bool:
        """Returns whether GPUs that have Transformer Engine compute with its layers; they find out
        when they start.

        Of a machine without it nothing is known here: actor/host.py's uses_transformer_engine
        decides there.
        """
        by_itself = self.lora is None and self.dtype != "float32" and self.device != "cpu"
        return self.transformer_engine is True or (self.transformer_engine == "auto" and by_itself)

    @property
    def layout(self) -> dict[str, int | None]:
        """Returns the fields that fix which slices each rank holds: `ranks` and all of parallel."""
        return {"ranks": self.world_size, **self.parallel.model_dump()}

    def problems(self) -> list[Rule]:
        p = self.parallel
        with_lora = self.lora is not None
        frozen = "with lora all other weights stay, the routers'"
        on_cpu = self.transformer_engine is True and self.device == "cpu"
        own_layers = "lora adds to Megatron's own linear layers, not Transformer Engine's"
        return [
            self._indivisible("tp x pp x cp", p.tp * p.pp * p.cp),
            self._indivisible("etp x ep x pp", p.etp * p.ep * p.pp),
            Rule(
                on_cpu,
                "transformer_engine true with device cpu: it needs CUDA",
                "set transformer_engine: false, or another device",
            ),
            Rule(
                with_lora and self.transformer_engine is True,
                own_layers,
                "set transformer_engine: false",
            ),
            Rule(
                with_lora and self.router_bias_update is not None,
                f"{frozen} biases too",
                "remove router_bias_update",
            ),
            Rule(
                with_lora and self.router_losses is not None,
                f"{frozen} too",
                "remove router_losses",
            ),
            Rule(
                with_lora and self.draft is not None,
                "lora trains only adapters of the model, not the draft",
                "remove draft",
            ),
            Rule(
                self.routing_replay and self.megatron.get("moe_router_fusion"),
                "routing_replay with megatron.moe_router_fusion: the fused kernel chooses "
                "experts by itself",
                "remove one of them",
            ),
        ]

    def _indivisible(self, what: str, size: int) -> Rule:
        up = -(-self.world_size // size) * size
        why = f"world_size {self.world_size} is not a multiple of {what} = {size}"
        return Rule(self.world_size % size, why, f"{up} would be")
