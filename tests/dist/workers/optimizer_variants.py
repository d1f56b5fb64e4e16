"""Trains, saves and resumes with each kind of optimizer, one rank; Transformer Engine's stand-in is on the path.

usage: python optimizer_variants.py FOLDER
"""

from tests.dist.workers.host_with_engine import DEVICE  # comes first: it prepares the host for Megatron

# isort: split

import json
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch.overrides import TorchFunctionMode

from examples.laptop.model import make_tiny_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.actor.saving import load_actor, save_actor
from megagrpo.certify.measure import joined
from megagrpo.config.schema import ActorConfig, OptimizerConfig
from megagrpo.weights.actor_weights import load_initial_weights
from tests.dist.workers.actor_ranks import RICH, batch_of, gradient
from tests.dist.workers.samples import VOCAB

AWARE = {"use_precision_aware_optimizer": True}
VARIANTS = {
    "plain": {},
    "aware": AWARE,
    "few bits": {
        **AWARE,
        "exp_avg_dtype": "bfloat16",
        "exp_avg_sq_dtype": "float16",
        "main_grads_dtype": "bfloat16",
        "store_param_remainders": False,
    },
    "half on the host": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
}
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "ffn_size": 48}
EXPERTS = {"num_experts": 4, "experts_per_token": 2}


class OnGpu(TorchFunctionMode):
    """Says of tensors that they are on a GPU, but for copies that were asked for on the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cuda.__get__:
            return not getattr(args[0], "on_host", False)
        if func is torch.Tensor.pin_memory:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.cpu:
            out = out.clone()
            out.on_host = True
        elif func in (torch.Tensor.float, torch.Tensor.detach, torch.Tensor.clone):
            out.on_host = getattr(args[0], "on_host", False)
        return out


def divide_as_on_gpu() -> None:
    """Lets the hybrid optimizer divide parameters between GPU and host as where there is a GPU."""
    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def divided(self, fraction):
        with OnGpu():
            return divide(self, fraction)

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = divided


@contextmanager
def an_actor(folder: Path, name: str, settings: dict):
    # tiny weights that move far: the update counts, not the rounding
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=0.1, megatron=settings)
    config = ActorConfig(logprob_chunk_tokens=32, micro_batch_tokens=64, dtype="bfloat16", device="cpu")
    config = config.model_copy(update={"transformer_engine": True})
    model = folder / "model"
    with joined(folder / name, config=config, optimizer=optimizer, model_path=model, device=DEVICE) as actor:
        load_initial_weights(actor, model)
        yield actor


def one_update(actor, shift: int) -> list[float]:
    loss = gradient(actor, batch_of(actor.mesh, shift=shift), RICH)
    return [loss, actor.optimizer_step(loss)["optim/grad_norm"]]


def run(folder: Path, name: str, settings: dict, reshardable: bool) -> dict:
    checkpoint = folder / f"{name} {reshardable}"
    checkpoint.mkdir()
    with an_actor(folder, f"first {name} {reshardable}", settings) as actor:
        before = [one_update(actor, number) for number in range(2)]
        plan = save_actor(actor, checkpoint, reshardable)
        plan.write()
        plan.finish()
        kinds = sorted({type(part.optimizer).__name__ for part in actor.optimizer.chained_optimizers})
        then = one_update(actor, 5)
        weights = {key: p.detach().clone() for key, p in actor.parameters().items()}
    with an_actor(folder, f"second {name} {reshardable}", settings) as actor:
        load_actor(actor, checkpoint)
        again = one_update(actor, 5)
        equal = all(torch.equal(p, weights[key]) for key, p in actor.parameters().items())
    torch.save(weights, folder / f"{name}.pt")
    return {"before": before, "resumed": then == again and equal, "kinds": kinds}


def other_kind(folder: Path) -> str:
    """What is said when a checkpoint is loaded with another kind of optimizer."""
    with an_actor(folder, "other", VARIANTS["plain"]) as actor:
        try:
            load_actor(actor, folder / "aware True")
        except ValueError as exc:
            return str(exc)
    return ""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    alphabet = "".join(chr(0x4E00 + number) for number in range(VOCAB))
    make_tiny_model(
        TinyModelConfig(path=str(folder / "model"), family="qwen3_moe", alphabet=alphabet, **SIZES, **EXPERTS), 0
    )
    divide_as_on_gpu()
    found = {
        f"{name} {reshardable}": run(folder, name, settings, reshardable)
        for name, settings in VARIANTS.items()
        for reshardable in (True, False)
        if reshardable or name in ("aware", "half on the host")
    }
    plain = torch.load(folder / "plain.pt")
    for name in VARIANTS:
        weights = torch.load(folder / f"{name}.pt")
        apart = torch.cat([(weights[key].float() - plain[key].float()).abs().flatten() for key in plain])
        found[f"{name} True"] |= {"from plain": float(apart.max()), "share": float((apart > 0).float().mean())}
    (folder / "found.json").write_text(json.dumps({"runs": found, "refused": other_kind(folder)}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
