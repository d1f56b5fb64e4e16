"""Which cases of the actor's tests CI runs: every two choices (model, layout, batch, recompute) meet in some case.

The table is made, not listed: a new model or layout is one line below. All other cases run by --full.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, cycle, product

MOE = ("qwen3_moe", "qwen3_moe_raw")
MODELS = ("qwen3", "qwen3_moe", "qwen2", "llama", "qwen3_tied", "qwen3_moe_raw")
LAYOUTS = {
    "DP2": {},
    "TP2+SP": {"tp": 2},
    "PP2": {"pp": 2},
    "PP2xVPP2": {"pp": 2, "vpp": 2},
    "CP2": {"cp": 2},
    "EP2": {"ep": 2},
    "TP2xEP2": {"tp": 2, "ep": 2},
    "TP2xETP2": {"tp": 2, "etp": 2},
    "TP2xPP2": {"tp": 2, "pp": 2},
    "EP2xPP2": {"ep": 2, "pp": 2},
    "CP2xPP2": {"cp": 2, "pp": 2},
}
FOUR_RANKS = ("TP2xPP2", "EP2xPP2", "CP2xPP2")  # the others: two
OF_FOUR_RANKS = ("qwen3", "qwen3_moe")  # what CI checks on four ranks, of which two share a core
BATCHES = {"packed": {"packing": True, "budget": 64}, "padded": {"packing": False, "budget": 200}}
RECOMPUTE = ("none", "full", "selective")
SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "ffn_size": 48}


@dataclass(frozen=True)
class LayoutCase:
    """One model in one layout: its logits and gradients against transformers, its update against one rank's."""

    model: str
    layout: str
    batch: str
    recompute: str

    @property
    def world(self) -> int:
        return 4 if self.layout in FOUR_RANKS else 2


def pairwise(choices: Mapping[str, Iterable[str]], possible: Callable[..., bool]) -> list[dict[str, str]]:
    """Few combinations, one choice each, in which all pairs of choices occur that any possible combination has.

    Greedy: the next one has most new pairs, and among those the choices that were made least.
    """
    named = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    rows = [row for row in named if possible(**row)]
    missing = {pair for row in rows for pair in pairs(row)}
    used: Counter[tuple[str, str]] = Counter()
    chosen = []
    while missing:
        best = max(rows, key=lambda row: (len(missing & pairs(row)), -sum(used[choice] for choice in row.items())))
        chosen.append(best)
        missing -= pairs(best)
        used.update(best.items())
    return chosen


def pairs(row: dict[str, str]) -> set[tuple[tuple[str, str], ...]]:
    return set(combinations(row.items(), 2))


def has(model: str, layout: str, **_: str) -> bool:
    """Only models with experts have expert-parallel layouts."""
    return model in MOE or not LAYOUTS[layout].keys() & {"ep", "etp"}


def of_ci(model: str, layout: str, **_: str) -> bool:
    return has(model, layout) and (layout not in FOUR_RANKS or model in OF_FOUR_RANKS)


CHOICES = {"model": MODELS, "layout": tuple(LAYOUTS), "batch": tuple(BATCHES), "recompute": RECOMPUTE}
CI = [LayoutCase(**row) for row in pairwise(CHOICES, of_ci)]
# each model, layout and batch that CI leaves out
REST = [
    LayoutCase(model, layout, batch, "none")
    for model, layout, batch in product(MODELS, LAYOUTS, BATCHES)
    if has(model, layout) and all((c.model, c.layout, c.batch) != (model, layout, batch) for c in CI)
]

# the large families, whose tests are test_actor_families.py: in CI every layout, and every two other choices
FAMILIES = ("mixtral", "glm4_moe", "deepseek_v3", "moonlight", "qwen3_5_moe", "minimax_m2")
MORE_FAMILIES = (  # by --full
    "glm4_moe_air",
    "deepseek_v3_plain",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "deepseek_v32",
    "qwen3_5",
    "qwen3_next",
    "gpt_oss",
    "nemotron_h",
    "nemotron_h_nano",
    "deepseek_v4",
    "kimi_linear",
    "glm5_next",
)
ONE_RANK = (  # of these one rank in CI
    *("qwen3_next", "glm4_moe_lite", "gpt_oss", "nemotron_h", "kimi_linear", "deepseek_v4", "glm5_next"),
)
FAMILY_LAYOUTS = ("TP2+SP", "PP2xVPP2", "TP2xEP2", "CP2", "PP2", "TP2xETP2", "EP2")
_OTHER_CHOICES = {"model": FAMILIES, "batch": tuple(BATCHES), "recompute": RECOMPUTE}
FAMILIES_CI = [
    LayoutCase(layout=layout, **row)
    for layout, row in zip(cycle(FAMILY_LAYOUTS), pairwise(_OTHER_CHOICES, lambda **_: True), strict=False)
]
# whole sequences of some heads, exchanged for parts of sequences of all
FAMILIES_CI.append(LayoutCase("qwen3_5_moe", "CP2", "packed", "none"))
# every layout with every batch, and with every recompute
FAMILIES_FULL = [
    LayoutCase(model, layout, batch, recompute)
    for model, layout in product(FAMILIES + MORE_FAMILIES, FAMILY_LAYOUTS)
    if model != "qwen3_5" or has(model, layout)  # it is dense
    if model != "gpt_oss" or layout != "TP2xETP2"  # experts with biases are whole
    for batch, recompute in (("packed", "none"), ("padded", "selective"), ("packed", "full"))
]

# of test_actor_sparse.py: where a choice of keys may go wrong
SPARSE_CI = [
    LayoutCase("glm_moe_dsa", "CP2", "packed", "none"),
    LayoutCase("glm_moe_dsa", "CP2", "padded", "full"),
    LayoutCase("glm_moe_dsa", "TP2xEP2", "packed", "selective"),
]
