"""The actor on the GPU, in float32 and in bfloat16, against itself in float32 on the CPU: five
families."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu_kit.figures import Figures, Setting, Unavailable
from bench.gpu_kit.models import (
    DEVICE,
    RICH,
    RandomTensors,
    description,
    random_actor,
    random_batch,
)
from megagrpo.actor import step
from megagrpo.actor.host import uses_transformer_engine
from megagrpo.config.schema import ActorConfig
from megagrpo.tools.certify.measure import whole
from megagrpo.weights.actor_weights import ActorWeights
from megagrpo.weights.copies.recorder import record_whole

CPU = torch.device("cpu")  # models on a GPU and on the CPU are compared: drawn on one of them
VOCAB = 160
_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}
_SIZES |= {"vocab_size": VOCAB}
_WIDE = {"num_attention_heads": 4, "head_dim": 32}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_EXPERTS |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
_LATENTS = {  # as DeepSeek-V3's heads: keys are longer than values (Megatron-LM issue 3003)
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "qwen3": _SIZES | _WIDE,
    "qwen3_moe": _SIZES | _WIDE | _EXPERTS,
    "qwen2": _SIZES | {"num_attention_heads": 4},
    "llama": _SIZES | {"num_attention_heads": 4, "hidden_size": 128},
    "deepseek_v3": _SIZES | _LATENTS,
}
VARIANTS = {
    "packed": {"packing": True, "micro_batch_tokens": 64},
    "padded": {"packing": False, "micro_batch_tokens": 200},
    "packed, recompute full": {"packing": True, "micro_batch_tokens": 64, "recompute": "full"},
}
LENGTHS, PROMPT = (40, 7, 23, 12, 31, 9, 18), 4
FLOAT32_BOUND = 1e-4  # log-probabilities, nats; gradients, relative
# bfloat16 keeps 8 bits. On a CPU it gives 0.01 and 0.03; with experts 0.05 and 0.11, since rounding
# gives a few tokens to other experts.
BFLOAT16 = {"dense": (0.06, 0.2), "experts": (0.15, 0.3)}


def truth(figures: Figures, setting: Setting) -> None:
    """Leaves every family's numbers in float32 on the CPU for `actor`. CUDA is hidden from this
    process."""
    for family in _families(setting):
        numbers = measure(family, "float32", setting.folder, VARIANTS["packed"])
        torch.save(numbers, _truth_file(setting, family))
        figures.add(f"{family}: loss", numbers["loss"])
        figures.add("  loaded weights that differ from their source", numbers["wrong"], at_most=0)


def actor(figures: Figures, setting: Setting) -> None:
    """Compares log-probabilities, loss, gradients and their norm of one update."""
    missing = [family for family in _families(setting) if not _truth_file(setting, family).exists()]
    if missing:
        raise Unavailable(f"section `float32 on the CPU` left nothing of {', '.join(missing)}")
    for family in _families(setting):
        exact = torch.load(_truth_file(setting, family))
        for dtype in ("float32", "bfloat16"):
            with_te = uses_transformer_engine(ActorConfig(dtype=dtype))
            layers = "Transformer Engine's" if with_te else "torch's"
            rows = [
                differences(measure(family, dtype, setting.folder, VARIANTS[variant]), exact)
                for variant in setting.of(tuple(VARIANTS), ("packed",))
            ]
            worst = {name: max((row[name] for row in rows), key=_nan_last) for name in rows[0]}
            kind = "experts" if "num_experts_per_tok" in FAMILIES[family] else "dense"
            bounds = (FLOAT32_BOUND, FLOAT32_BOUND) if dtype == "float32" else BFLOAT16[kind]
            logprob = "logprob_max" if dtype == "float32" else "logprob_mean"
            which = "largest" if dtype == "float32" else "mean"
            others = (
                f"largest {worst['logprob_max']:.2g}, loss {worst['loss']:.2g}, norm "
                f"{worst['norm']:.2g}"
            )
            figures.add(
                f"{family} {dtype}: loaded weights that differ",
                worst["wrong"],
                note=f"{layers} layers",
                at_most=0,
            )
            figures.add(
                f"{family} {dtype}: {which} log-prob difference",
                worst[logprob],
                "nats",
                others,
                bounds[0],
            )
            note = f"worst parameter {worst['worst_gradient']:.2g}"
            figures.add(
                f"{family} {dtype}: gradients, relative", worst["gradient"], "", note, bounds[1]
            )


def measure(family: str, dtype: str, folder: Path, variant: dict[str, Any]) -> dict:
    """Returns log-probabilities, loss, gradients (whole HF tensors) and gradient norm of one rich
    update."""
    place = folder / "actors" / f"{len(list((folder / 'actors').glob('*')))}"
    options = {"dtype": dtype, "logprob_chunk_tokens": 32, **variant}
    with random_actor(
        place, description(family, FAMILIES[family]), drawn_on=CPU, **options
    ) as built:
        weights = weights_of(built)
        source, loaded = (
            RandomTensors(built.arch, DEVICE, drawn_on=CPU),
            whole(weights, built.parameters(), built.mesh),
        )
        wrong = sum(not torch.equal(loaded[name].to(DEVICE), source[name]) for name in source)
        batch = random_batch(VOCAB, LENGTHS, PROMPT)
        rows = range(len(LENGTHS))
        logprobs = step.token_logprobs(built, batch, 1.0)
        denominators = step.denominators_of(built, batch, rows, RICH, max(LENGTHS))
        loss = step.backward(built, batch, rows, RICH, 1.0, denominators)["loss/total"]
        gradients = whole(built.trained_weights(weights), built.gradients(), built.mesh)
        norm = built.optimizer_step(loss)["optim/grad_norm"]
        gradients = {name: gradient.float().cpu() for name, gradient in gradients.items()}
    return {
        "logprobs": logprobs.cpu(),
        "gradients": gradients,
        "loss": loss,
        "norm": norm,
        "wrong": wrong,
    }


def weights_of(built: Any) -> ActorWeights:
    """Returns which slice of which HF tensor lies where in an actor that read no folder."""
    from megagrpo.models.table import model_tensors

    dtype = getattr(torch, built.config.dtype)
    specs = {spec.name: (spec.shape, dtype) for spec in model_tensors(built.arch)}
    return ActorWeights(
        record_whole(built.load_hf, specs, built.parameters()).copies, specs, built.parameters
    )


def differences(values: dict, exact: dict) -> dict[str, float]:
    """Log-probabilities and loss absolute; |g - g32| / |g32| in the 2-norm, of all gradients and of
    the worst."""
    gap = (values["logprobs"] - exact["logprobs"]).abs()[exact["logprobs"] != 0]
    names = [name for name, gradient in exact["gradients"].items() if gradient.norm() > 0]
    each = {name: relative(values["gradients"][name], exact["gradients"][name]) for name in names}
    mine, theirs = (
        torch.cat([side["gradients"][name].flatten() for name in names]) for side in (values, exact)
    )
    return {
        "logprob_mean": float(gap.mean()),
        "logprob_max": float(gap.max()),
        "gradient": relative(mine, theirs),
        "worst_gradient": max(each.values(), key=_nan_last),
        "loss": abs(values["loss"] - exact["loss"]),
        "norm": abs(values["norm"] / exact["norm"] - 1),
        "wrong": values["wrong"],
    }


def relative(values: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns |values - exact| / |exact| in the 2-norm."""
    return float((values - exact).norm() / exact.norm())


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _families(setting: Setting) -> Iterator[str]:
    yield from setting.of(tuple(FAMILIES), ("qwen3", "qwen3_moe", "deepseek_v3"))


def _truth_file(setting: Setting, family: str) -> Path:
    return setting.folder / f"truth_{family}.pt"
