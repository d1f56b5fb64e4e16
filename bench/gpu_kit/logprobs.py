"""Log-probabilities of a 1.7B-shaped model against transformers in float32, and what logits in
bfloat16 would do."""

import torch
from torch import Tensor

from bench.gpu_kit.figures import Figures, Setting, Unavailable
from bench.gpu_kit.models import (
    DEVICE,
    QWEN3_1_7B,
    QWEN3_TINY,
    RandomTensors,
    description,
    random_actor,
    random_batch,
)
from megagrpo.actor import step
from megagrpo.cpu.torchvision_ops import define_torchvision_operators
from megagrpo.models.table import architecture_of
from megagrpo.types import Batch

SPREAD = 4.0  # of the logits
PROMPT = 8
FLOAT32_BOUND = 1e-3  # largest difference, nats
BFLOAT16_BOUND = 1.5  # mean difference over that of transformers in bfloat16


def logprobs(figures: Figures, setting: Setting) -> None:
    """Compares the actor in both dtypes, its last hidden states with bfloat16 logits, and
    transformers in bfloat16."""
    sizes = setting.of(QWEN3_1_7B, QWEN3_TINY)
    lengths = setting.of([1024, 700, 333, 1024], [40, 17, 9])
    batch = random_batch(sizes["vocab_size"], lengths, PROMPT)
    exact, theirs = of_transformers(sizes, batch)
    gap = _gap(theirs, exact, batch)
    figures.add(
        "transformers in bfloat16: mean difference",
        float(gap.mean()),
        "nats",
        f"largest {float(gap.max()):.2g}",
    )
    rounded: Tensor | None = None
    for dtype, bound in (
        ("float32", FLOAT32_BOUND),
        ("bfloat16", BFLOAT16_BOUND * float(gap.mean())),
    ):
        options = {"dtype": dtype, "micro_batch_tokens": 4096}
        folder = setting.folder / f"logprobs_{dtype}"
        with random_actor(folder, description("qwen3", sizes), SPREAD, **options) as actor:
            mine = step.token_logprobs(actor, batch, 1.0)
            rounded = with_bfloat16_logits(step.hidden_states(actor, batch), batch)
        found = _gap(mine, exact, batch)
        worst = float(found.max())
        value, kind = (worst, "largest") if dtype == "float32" else (float(found.mean()), "mean")
        figures.add(
            f"actor in {dtype}: {kind} difference", value, "nats", f"largest {worst:.2g}", bound
        )
    assert rounded is not None, "bfloat16 came last"
    for title, other in (("mean difference", exact), ("mean change by that alone", mine)):
        found = _gap(rounded, other, batch)
        note = f"largest {float(found.max()):.2g}"
        figures.add(f"the same with logits in bfloat16: {title}", float(found.mean()), "nats", note)


def of_transformers(sizes: dict, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities [T] of the batch's tokens by transformers, in float32 and all in
    bfloat16."""
    define_torchvision_operators()
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as exc:
        raise Unavailable(f"transformers cannot be imported: {exc}") from None
    hf = description("qwen3", sizes)
    config = AutoConfig.for_model(
        **{key: value for key, value in hf.items() if key != "architectures"}
    )
    theta = getattr(config, "rope_parameters", None) or {
        "rope_theta": config.rope_theta
    }  # as of transformers 5
    assert theta["rope_theta"] == hf["rope_theta"], theta
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config).to(DEVICE).float().eval()
    tensors = RandomTensors(architecture_of(hf), DEVICE, SPREAD)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
        exact = _by_row(model, batch)
        return exact, _by_row(model.bfloat16(), batch)


def _by_row(model, batch: Batch) -> Tensor:
    out = torch.zeros_like(batch.rollout_logprobs)
    for start, tokens in zip(
        batch.starts.tolist(), batch.tokens.long().split(batch.lengths.tolist()), strict=True
    ):
        tokens = tokens.to(DEVICE)
        logits = model(input_ids=tokens[None]).logits[0, :-1].float()
        found = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        out[start + 1 : start + len(tokens)] = found.cpu()
    return out


def with_bfloat16_logits(states, batch: Batch) -> Tensor:
    """Returns log-probabilities [T] from the actor's hidden states and a bfloat16 product with its
    output weight."""
    out = torch.zeros_like(batch.rollout_logprobs)
    at = states.index >= 0
    hidden, weight = (
        states.hidden[states.index[at].to(DEVICE)].bfloat16(),
        states.output_weight.bfloat16(),
    )
    parts = [
        (part @ weight.t()).float().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
        for part, tokens in zip(
            hidden.split(1024), batch.tokens[at].long().to(DEVICE).split(1024), strict=True
        )
    ]
    out[at] = torch.cat(parts).cpu()
    return out


def _gap(values: Tensor, exact: Tensor, batch: Batch) -> Tensor:
    """Returns absolute differences [tokens] where the policy sampled."""
    return (values - exact).abs()[batch.loss_mask]
