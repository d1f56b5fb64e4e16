"""Saves a model with its optimizer and loads it again: GB/s, and whether every bit comes back."""

import time
from functools import partial
from pathlib import Path

import torch

from bench.gpu_kit.figures import Figures, Setting
from bench.gpu_kit.models import DEVICE, PLAIN, QWEN3_TINY, description, random_actor, random_batch
from megagrpo.actor import step
from megagrpo.actor.saving import load_actor, save_actor
from megagrpo.checkpoint import save as checkpoint
from megagrpo.checkpoint.save import RunIdentity
from megagrpo.config.schema import CheckpointConfig
from megagrpo.types import TrainState

SIZES = {
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
SIZES |= {"head_dim": 128, "intermediate_size": 6144, "vocab_size": 32_768}


def checkpoints(figures: Figures, setting: Setting) -> None:
    """Measures both forms: parts of this layout, and the one that any layout can load."""
    sizes = setting.of(SIZES, QWEN3_TINY)
    batch = random_batch(sizes["vocab_size"], [32] * 4, 8)
    identity = RunIdentity({"model": "kit"}, {"ranks": 1})
    with random_actor(
        setting.folder / "saved", description("qwen3", sizes), dtype="bfloat16"
    ) as actor:
        step.update(actor, batch, PLAIN, 1.0, 24)  # the optimizer has a state
        truth = step.token_logprobs(actor, batch, 1.0)
        for form, reshardable in (("parts of this layout", False), ("for any layout", True)):
            root = setting.folder / f"checkpoints_{reshardable}"
            start = time.perf_counter()
            plan = partial(_plan, actor, reshardable=reshardable)
            saved = checkpoint.PendingSave(
                root, TrainState(step=1), identity, CheckpointConfig(keep=1), plan, actor.mesh
            ).finish()
            seconds, num_bytes = time.perf_counter() - start, _bytes_below(saved)
            figures.add(
                f"{form}: save",
                num_bytes / seconds / 1e9,
                "GB/s",
                f"{num_bytes / 1e9:.2f} GB in {seconds:.2f} s",
            )
            with torch.no_grad():
                for parameter in actor.parameters().values():
                    parameter.zero_()
            start = time.perf_counter()
            checkpoint.load(saved, identity, lambda folder: load_actor(actor, folder), actor.mesh)
            seconds = time.perf_counter() - start
            figures.add(
                f"{form}: check and load", num_bytes / seconds / 1e9, "GB/s", f"{seconds:.2f} s"
            )
            wrong = int((step.token_logprobs(actor, batch, 1.0) != truth).sum())
            figures.add(
                "  log-probs that differ afterwards", wrong, "", f"on {DEVICE.type}", at_most=0
            )


def _plan(actor, folder: Path, reshardable: bool):
    return save_actor(actor, folder, reshardable)


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
