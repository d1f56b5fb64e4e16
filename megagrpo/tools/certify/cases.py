"""The cases of a certificate: layouts x {padded, packed} x {small, large token budget} x {no
recompute, full}."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal, get_args

from megagrpo.config.schema import ActorConfig, ParallelConfig

Recompute = Literal["none", "full"]
# settings of the experiment's actor that every case has
KEPT = {
    "transformer_engine",
    "deadline_s",
    "lora",
    "vision",
    "router_losses",
    "routing_replay",
}
# tokens of a micro-batch: one to three samples, or all
SMALL_BUDGET = 48
LARGE_BUDGET = 4096

# name -> (ranks, parallel sizes); remaining ranks are data parallel
Layouts = dict[str, tuple[int, dict[str, int]]]
LAYOUTS: Layouts = {
    "1 rank": (1, {}),
    "DP2": (2, {}),
    "TP2+SP": (2, {"tp": 2}),
    "PP2": (2, {"pp": 2}),
    "PP2xVPP2": (2, {"pp": 2, "vpp": 2}),
    "CP2": (2, {"cp": 2}),
    "EP2": (2, {"ep": 2}),
    "TP2xEP2": (2, {"tp": 2, "ep": 2}),
    "TP2xETP2": (2, {"tp": 2, "etp": 2}),
    "TP2xPP2": (4, {"tp": 2, "pp": 2}),
    "TP2xDP2": (4, {"tp": 2}),
    "TP2xCP2": (4, {"tp": 2, "cp": 2}),
    "EP2xPP2": (4, {"ep": 2, "pp": 2}),
    "CP2xPP2": (4, {"cp": 2, "pp": 2}),
}


@dataclass(frozen=True)
class Case:
    """One run of the batch. With the distributed optimizer only loss, norm and weights are
    compared."""

    layout: str
    ranks: int
    parallel: dict[str, int] = field(default_factory=dict)
    packing: bool = False
    budget: int = LARGE_BUDGET
    recompute: Recompute = "none"
    distributed: bool = False

    @property
    def variant(self) -> str:
        """The options in which the case differs from others of its layout, for the report."""
        parts = ["packed" if self.packing else "padded", f"{self.budget} tokens"]
        parts += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        return ", ".join(parts + (["distributed optimizer"] if self.distributed else []))


REFERENCE = Case(layout="1 rank", ranks=1)
# each weight is the next float32 above or below: how far rounding moves this model's figures
NEIGHBOR = Case(layout="1 rank, next floats", ranks=1)


def layouts_of(config: ActorConfig) -> Layouts:
    """Returns LAYOUTS and the experiment's own, with even stages: the tiny model has its own number
    of layers."""
    uneven = {"first_stage_layers", "last_stage_layers"}
    own = config.parallel.model_dump(exclude=uneven, exclude_defaults=True)
    is_standard = (config.world_size, own) in LAYOUTS.values()
    return LAYOUTS if is_standard else LAYOUTS | {"the experiment's": (config.world_size, own)}


def grid(
    layouts: Layouts,
    ranks: int,
    refused: Callable[[ActorConfig], Sequence[str]],
    only: Sequence[str] | None,
) -> tuple[list[Case], dict[str, str]]:
    """Returns the cases to run, the reference first, and the reason for each layout that is left
    out. refused: why the model cannot have a layout.

    Raises ValueError for a name in `only` that is not a layout, or whose layout cannot run.
    """
    unknown = sorted(set(only or ()) - layouts.keys())
    if unknown:
        raise ValueError(f"no layout is called {unknown[0]!r}; there are: {', '.join(layouts)}")
    cases = []
    left_out = {}
    for name, (needed, parallel) in layouts.items():
        sizes = ParallelConfig.model_validate(parallel)
        if problems := refused(ActorConfig(world_size=needed, parallel=sizes)):
            left_out[name] = "; ".join(problems)
        elif needed > ranks:
            left_out[name] = f"needs {needed} ranks, {ranks} were given"
        elif only is not None and name not in (*only, REFERENCE.layout):
            left_out[name] = "not asked for"
        if name in left_out and name in (only or ()):
            raise ValueError(f"nothing ran, because {name} cannot: {left_out[name]}")
        if name in left_out:
            continue
        plain = Case(layout=name, ranks=needed, parallel=parallel)
        packed = (True,) if sizes.dynamic_context else (False, True)
        for recompute, packing, budget in product(
            get_args(Recompute), packed, (LARGE_BUDGET, SMALL_BUDGET)
        ):
            cases.append(replace(plain, packing=packing, budget=budget, recompute=recompute))
        if needed > sizes.tp * sizes.pp * sizes.cp:  # more than one replica
            cases.append(replace(plain, packing=True, distributed=True))
    assert cases[0] == REFERENCE
    cases.insert(1, NEIGHBOR)
    return cases, left_out
