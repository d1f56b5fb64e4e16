"""The base of every choice with a `name` in the `algorithm` section, and its number types."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megagrpo.config.section import Section

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Ddof = Literal[0, 1]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class Variant(Section):
    """Holds the fields of one choice, which `name` selects in YAML; class variables describe it to the program."""

    formula: ClassVar[str]  # in the papers' notation, for AlgorithmConfig.formula
    aggregations: ClassVar[tuple[Aggregation, ...] | None] = None  # those the paper's objective needs; None: any
    aggregation_advice: ClassVar[str] = ""  # given for another aggregation; {aggregation} is its name

    name: str
