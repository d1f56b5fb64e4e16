"""The `algorithm` section. Options of an algorithm live in that algorithm's own model; formulas are in the algo package."""

from typing import Annotated, Literal

from pydantic import Field

from megagrpo.config_base import Section


class GrpoAdvantage(Section):
    name: Literal["grpo"] = "grpo"
    std_ddof: Literal[0, 1] = 1
    eps: Annotated[float, Field(gt=0)] = 1e-6
    single_sample: Literal["zero", "raw"] = "zero"


class DrGrpoAdvantage(Section):
    name: Literal["dr_grpo"] = "dr_grpo"
    single_sample: Literal["zero", "raw"] = "zero"


class PpoClipLoss(Section):
    name: Literal["ppo_clip"] = "ppo_clip"
    clip_ratio_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_ratio_high: Annotated[float, Field(gt=0)] = 0.2


class KlConfig(Section):
    """KL to the reference model. Coefficient 0: no reference is kept."""

    loss_coef: Annotated[float, Field(ge=0)] = 0.0
    estimator: Literal["k3"] = "k3"


class AlgorithmConfig(Section):
    advantage: Annotated[GrpoAdvantage | DrGrpoAdvantage, Field(discriminator="name")] = GrpoAdvantage()
    loss: Annotated[PpoClipLoss, Field()] = PpoClipLoss()
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    loss_scale_factor: Annotated[float, Field(gt=0)] | None = None  # C of seq-mean-token-sum-norm; default: max_response_tokens
    kl: KlConfig = KlConfig()
    entropy_coef: float = 0.0
    mask_truncated: bool = False

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError where the advantage cannot work with this many samples per prompt."""

    @property
    def uses_reference(self) -> bool:
        return self.kl.loss_coef > 0
