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
    PositiveFraction,
    PositiveInt,
    Processes,
    Rule,
    Seconds,
    Section,
    repeated,
)


class ParallelConfig(Section):
    """Megatron's layout. world_size / (tp pp cp) ranks are data-parallel, and sequence parallelism
    is on when tp > 1."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    pp: PositiveInt = 1
    """Pipeline stages."""
    vpp: PositiveInt = 1
    """Virtual stages per rank. More than 1 needs pp > 1."""
    cp: PositiveInt = 1
    """Context-parallel ranks, which share one sequence."""
    dynamic_context: bool = False
    """Let a packed micro-batch take 1, 2, 4 ... of the cp ranks, as few as its samples and the balance
    allow. A rank holds at most `micro_batch_tokens` / cp tokens of several samples."""
    ep: PositiveInt = 1
    """Expert-parallel ranks."""
    etp: PositiveInt = 1
    """Tensor-parallel ranks per expert."""
    first_stage_layers: PositiveInt | None = None
    """Layers of this pipeline stage. Default: stages without a number share the rest equally."""
    last_stage_layers: PositiveInt | None = None
    """Layers of this pipeline stage. Default: stages without a number share the rest equally."""

    def problems(self) -> list[Rule]:
        return [
            Rule(
                self.vpp > 1 and self.pp == 1,
                f"vpp {self.vpp} needs pp > 1: virtual stages share the ranks of a pipeline",
                "raise pp, or remove vpp",
            ),
            *(
                Rule(
                    getattr(self, key) and self.pp == 1,
                    f"{key} {getattr(self, key)} needs pp > 1: without a pipeline one stage has all layers",
                    "raise pp, or remove it",
                )
                for key in ("first_stage_layers", "last_stage_layers")
            ),
            Rule(
                self.dynamic_context and (self.cp == 1 or self.context_sizes[-1] != self.cp),
                f"dynamic_context halves the context-parallel ranks, and cp is {self.cp}",
                "let cp be 2, 4, 8 ..., or remove dynamic_context",
            ),
        ]

    @property
    def context_sizes(self) -> list[int]:
        """Returns how many context-parallel ranks a micro-batch may take, ascending."""
        return [1 << n for n in range(self.cp.bit_length())] if self.dynamic_context else [self.cp]

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
                f"a stage of {uneven[0]} layers does not divide into vpp = {self.vpp} virtual stages"
            )
        return stages


class OptimizerConfig(Section):
    """Adam with decoupled weight decay."""

    lr: PositiveFraction = 1e-6
    """Learning rate after the warm-up."""
    min_lr: Fraction = 0.0
    """Learning rate at the last update, if the schedule decays."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Keep the rate constant after the warm-up, or decay it to `min_lr`."""
    warmup_steps: NonNegativeInt = 0
    """Updates of linear warm-up."""
    weight_decay: Fraction = 0.0
    """Weight decay, which spares norms and biases."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of Adam's second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm. 0: no clipping."""
    distributed: bool = True
    """Shard the optimizer state over data-parallel ranks."""
    megatron: LibrarySettings = Field(default={})
    """Fields of Megatron's OptimizerConfig, such as `optimizer_cpu_offload: true`."""

    def problems(self) -> list[Rule]:
        return [
            Rule(
                self.min_lr > self.lr, f"min_lr {self.min_lr:g} is above lr {self.lr:g}", "lower it"
            )
        ]


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Section):
    """Train low-rank adapters and freeze W: y = W x + alpha / rank * B (A x)."""

    rank: PositiveInt = 16
    """Rows of A, columns of B."""
    alpha: PositiveFloat = 32.0
    """Scale: adapters are multiplied by alpha / rank."""
    targets: list[Projection] = Field(default=list(get_args(Projection)), min_length=1)
    """Projections with adapters. In a model with experts, those in the experts."""

    @field_validator("targets")
    @classmethod
    def _each_once(cls, targets: list[Projection]) -> list[Projection]:
        if twice := repeated(targets):
            raise ValueError(f"names {', '.join(twice)} twice")
        return targets

    @property
    def scale(self) -> float:
        """Returns the factor of B (A x)."""
        return self.alpha / self.rank


class VisionConfig(Section):
    """The vision tower of a vision-language model. By default it is trained."""

    train: Literal["none", "projector", "all"] = "all"
    """Part to train. projector: the mergers that turn patches into features."""


class DraftConfig(Section):
    """Load, train, publish and export the multi-token-prediction layer, which proposes tokens to
    engines (`rollout.draft_tokens`)."""

    train: bool = True
    """Train the draft in every update towards what the policy predicts for the token after next.
    Draft inputs are detached, so the policy's gradients do not change."""


class RouterLossConfig(Section):
    """Auxiliary losses for routers. They cover real tokens and are divided by counts over the
    update and all ranks."""

    balance: NonNegativeFloat = 0.0
    """Coefficient of DeepSeek-V3's sequence balance loss (1 is balanced), which is averaged over
    the update's samples and summed over layers. DeepSeek-V3 used 0.0001."""
    z: NonNegativeFloat = 0.0
    """Coefficient of the z-loss, the squared log-sum-exp of router logits, which is averaged over
    the update's tokens and summed over layers. ST-MoE used 0.001."""

    def problems(self) -> list[Rule]:
        return [
            Rule(
                not self.balance and not self.z,
                "balance and z are both 0",
                "set one, or remove router_losses",
            )
        ]


class ActorConfig(Section):
    """The Megatron-Core learner."""

    world_size: PositiveInt = 1
    """Trainer ranks over all nodes."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: CUDA if a GPU is visible, else the CPU. On a CPU bfloat16 is then refused."""
    dtype: Dtype = "float32"
    """Type of weights and activations. Sums and optimizer state are float32."""
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    vision: VisionConfig | None = None
    draft: DraftConfig | None = None
    router_bias_update: PositiveFloat | None = None
    """Move router biases by this much after each update, up for experts with fewer tokens than the
    mean. DeepSeek-V3 balances experts like this and used 0.001. Default: biases stay."""
    router_losses: RouterLossConfig | None = None
    routing_replay: Literal["rollout", "old"] | None = None
    """Experts that the actor's forward passes reuse, with weights from the actor's own routers.
    rollout: the engine's experts (R3, arXiv 2510.11370). old: the experts from the
    log-probabilities before a step's first update (R2, arXiv 2507.18071). The reference always
    routes for itself. Default: routers choose."""
    micro_batch_tokens: PositiveInt = 4096
    """Most tokens per forward pass, padding included."""
    packing: bool = True
    """Put several sequences in one row, without padding."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward pass: none, those in `megatron.recompute_modules`,
    or all, layer by layer."""
    transformer_engine: Literal["auto"] | bool = "auto"
    """Use Transformer Engine's layers, attention and grouped experts. auto: on CUDA if installed,
    but not with `lora`, because adapters need Megatron's layers, and not in float32, because it
    would multiply in TF32."""
    megatron: LibrarySettings = Field(default={})
    """Fields of Megatron's TransformerConfig, such as `moe_permute_fusion: true`. See [which are
    tried and refused](#settings-of-libraries-that-are-refused)."""
    ddp: LibrarySettings = Field(default={})
    """Fields of Megatron's DistributedDataParallelConfig, such as `bucket_size: 40000000`."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at the same time, as a block of [chunk, vocab / tp]."""
    threads: Processes = 1
    """Operator threads per rank on a CPU."""
    deadline_s: Seconds = 1800.0
    """Longest wait in a collective. Default with `rollout.quantization` and `rollout.colocate`:
    7200, because a rank waits there for engines that compile kernels."""
    max_restarts: NonNegativeInt = 3
    """Most restarts of all ranks in a run. Ranks restart from the last checkpoint after one was
    lost."""

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
        sizes = self.parallel.model_dump(exclude={"dynamic_context"})
        return {"ranks": self.world_size, **sizes}

    def problems(self) -> list[Rule]:
        p = self.parallel
        with_lora = self.lora is not None
        return [
            self._indivisible("tp x pp x cp", p.tp * p.pp * p.cp),
            self._indivisible("etp x ep x pp", p.etp * p.ep * p.pp),
            Rule(
                self.transformer_engine is True and self.device == "cpu",
                "transformer_engine true with device cpu: it needs CUDA",
                "set transformer_engine: false, or another device",
            ),
            Rule(
                p.dynamic_context and not self.packing,
                "parallel.dynamic_context gives packed micro-batches their ranks, and packing is off",
                "set packing: true, or remove dynamic_context",
            ),
            Rule(
                with_lora and self.transformer_engine is True,
                "lora adds to Megatron's own linear layers, not Transformer Engine's",
                "set transformer_engine: false",
            ),
            *(
                Rule(
                    with_lora and getattr(self, key) is not None,
                    "with lora all other weights stay, the routers' and their biases too",
                    f"remove {key}",
                )
                for key in ("router_bias_update", "router_losses")
            ),
            Rule(
                with_lora and self.draft is not None,
                "lora trains only adapters of the model, not the draft",
                "remove draft",
            ),
            Rule(
                self.routing_replay and self.megatron.get("moe_router_fusion"),
                "routing_replay with megatron.moe_router_fusion: the fused kernel chooses experts by itself",
                "remove one of them",
            ),
        ]

    def _indivisible(self, what: str, size: int) -> Rule:
        up = -(-self.world_size // size) * size
        why = f"world_size {self.world_size} is not a multiple of {what} = {size}"
        return Rule(self.world_size % size, why, f"{up} would be")
