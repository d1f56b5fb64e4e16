"""One update of a 1.7B-shaped model over packed tokens: speed, share of the peak, memory,
synchronizations."""

import time
from collections.abc import Sequence

import torch

from bench.gpu_kit.figures import Figures, Setting
from bench.gpu_kit.models import (
    DEVICE,
    PLAIN,
    QWEN3_1_7B,
    QWEN3_TINY,
    RICH,
    description,
    random_actor,
    random_batch,
)
from bench.gpu_kit.timing import peak_bytes, seconds_of, synchronizations, wait_for
from megagrpo.actor import step
from megagrpo.config.hardware import hardware_called
from megagrpo.models.architecture import Architecture
from megagrpo.tools.plan.work import model_work

_SHOWN = 12  # places of synchronizations, the most frequent ones


def with_recompute(figures: Figures, setting: Setting) -> None:
    """Measures 16,384 tokens with every layer's activations computed again."""
    _measure(figures, setting, "full", setting.of(16, 4))


def without_recompute(figures: Figures, setting: Setting) -> None:
    """Measures 8,192 tokens with all activations kept: those of 16,384 and the optimizer would not
    fit into 80 GB."""
    _measure(figures, setting, "none", setting.of(8, 4))


def without_logits(figures: Figures, setting: Setting) -> None:
    """Measures the peak of forward and backward of a small model with a large vocabulary: its
    logits never exist."""
    sizes = QWEN3_TINY | {"vocab_size": setting.of(65_536, 512)}
    sizes |= setting.of(
        {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64, "intermediate_size": 1024},
        {},
    )
    lengths = setting.of([1024] * 16, [32] * 4)
    options = {"dtype": "bfloat16", "micro_batch_tokens": sum(lengths)}
    with random_actor(
        setting.folder / "without_logits", description("qwen3", sizes), **options
    ) as actor:
        batch, rows = random_batch(sizes["vocab_size"], lengths, 1), range(len(lengths))
        denominators = step.denominators_of(actor, batch, rows, RICH, max(lengths))

        def both_ways() -> None:
            step.backward(actor, batch, rows, RICH, 1.0, denominators)

        both_ways()
        share = peak_bytes(both_ways, DEVICE) / (4 * sum(lengths) * sizes["vocab_size"])
    figures.add(
        "peak of forward and backward",
        share,
        "",
        "of float32 logits of all tokens; 0 on a CPU",
        at_most=0.25,
    )


def _measure(figures: Figures, setting: Setting, recompute: str, sequences: int) -> None:
    sizes = setting.of(QWEN3_1_7B, QWEN3_TINY)
    lengths, prompt = [setting.of(1024, 32)] * sequences, setting.of(256, 8)
    options = {"dtype": "bfloat16", "micro_batch_tokens": sum(lengths), "recompute": recompute}
    folder = setting.folder / f"step_{recompute}"
    with random_actor(folder, description("qwen3", sizes), **options) as actor:
        batch = random_batch(sizes["vocab_size"], lengths, prompt)

        def update() -> None:
            step.update(actor, batch, PLAIN, 1.0, max(lengths) - prompt)

        start = time.perf_counter()
        update()
        wait_for(DEVICE)
        figures.add("first update", time.perf_counter() - start, "s", "with all that is made once")
        seconds = seconds_of(update, DEVICE)
        tokens, trained = sum(lengths), int(batch.loss_mask.sum())
        figures.add("update", seconds, "s", f"{tokens:,} tokens, {trained:,} of them trained")
        figures.add("tokens/s", tokens / seconds)
        tflops = update_flops(actor.arch, lengths, trained) / seconds / 1e12
        figures.add(
            "model TFLOP/s", tflops, "", "forward once, backward twice; recomputing does not count"
        )
        peak = peak_tflops()
        figures.add(
            "MFU",
            tflops / peak if peak else None,
            "",
            f"of {peak} TFLOP/s" if peak else "device not known",
        )
        figures.add(
            "log-probabilities",
            seconds_of(lambda: step.token_logprobs(actor, batch, 1.0), DEVICE),
            "s",
        )
        if DEVICE.type == "cuda":
            figures.add("memory held by the actor", torch.cuda.memory_allocated() / 2**30, "GiB")
        figures.add(
            "peak beyond that",
            peak_bytes(update, DEVICE) / 2**30,
            "GiB",
            "0 on a CPU: not measured",
        )
        with synchronizations(DEVICE) as found:
            update()
        figures.add("synchronizations of an update", found.total())
        for place, count in found.most_common(_SHOWN):
            figures.add(f"  at {place}", count)


def update_flops(arch: Architecture, lengths: Sequence[int], trained: int) -> float:
    """Returns the model's FLOPs of one update: three forwards of sequences of these lengths,
    `trained` output rows."""
    work = model_work(arch)
    layers = (work.token_flops - 2.0 * work.vocabulary) * sum(lengths)
    attention = arch.num_layers * arch.attention.pair_flops * sum(n * (n + 1) / 2 for n in lengths)
    return 3 * (layers + attention + 2.0 * work.vocabulary * trained)


def peak_tflops() -> float | None:
    """Returns the device's bfloat16 peak of config/hardware.py, None where it is not listed."""
    gpu = hardware_called(torch.cuda.get_device_name() if DEVICE.type == "cuda" else "")
    return gpu and gpu.bf16_tflops
