"""The same update twice: seconds of the first, which compiles, and whether its bits repeat."""

import time

import torch

from bench.gpu_kit.figures import Figures, Setting
from bench.gpu_kit.models import DEVICE, QWEN3_TINY, RICH, description, random_actor, random_batch
from bench.gpu_kit.timing import wait_for
from megagrpo.actor import step
from megagrpo.actor.host import prepare_host

_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_EXPERTS |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
FAMILIES = {"qwen3": QWEN3_TINY, "qwen3_moe": QWEN3_TINY | _EXPERTS}


def compile_time(figures: Figures, setting: Setting) -> None:
    """Measures the first and the second update of a process: Megatron's fusions are compiled in the
    first."""
    for family, sizes in FAMILIES.items():
        with random_actor(
            setting.folder / f"compiled {family}", description(family, sizes), dtype="bfloat16"
        ) as actor:
            batch, seconds = random_batch(sizes["vocab_size"], [64] * 4, 8), []
            for _ in range(2):
                start = time.perf_counter()
                step.update(actor, batch, RICH, 1.0, 56)
                wait_for(DEVICE)
                seconds.append(time.perf_counter() - start)
        figures.add(f"{family}: first update", seconds[0], "s", f"the second {seconds[1]:.3g} s")


def repeats(figures: Figures, setting: Setting) -> None:
    """Makes one update twice from the same weights, as trainers do and with
    rollout.deterministic."""
    for deterministic in (False, True):
        prepare_host(deterministic=deterministic)
        for family, sizes in FAMILIES.items():
            found = [
                _updated(setting, f"{family} {deterministic} {number}", family, sizes)
                for number in range(2)
            ]
            apart = sum(int((a != b).sum()) for a, b in zip(*found, strict=True))
            what = (
                f"{family}, {'deterministic' if deterministic else 'as it is'}: weights that "
                "differ after an update"
            )
            figures.add(
                what,
                apart,
                "",
                f"of {sum(map(len, found[0])):,}",
                at_most=0 if deterministic else None,
            )


def _updated(setting: Setting, name: str, family: str, sizes: dict) -> list[torch.Tensor]:
    batch = random_batch(sizes["vocab_size"], [64] * 4, 8)
    with random_actor(
        setting.folder / f"repeats {name}", description(family, sizes), lr=1e-2, dtype="bfloat16"
    ) as actor:
        step.update(actor, batch, RICH, 1.0, 56)
        return [values.detach().flatten().cpu() for values in actor.parameters().values()]
