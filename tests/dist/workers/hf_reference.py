"""Random Hugging Face models, and their logits and gradients by transformers: the truth for the actor's tests.

A process of its own: transformers' models and the trainer's shims do not share one. usage: hf_reference.py FOLDER
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tests.dist.workers.samples import LENGTHS, NUM_SAMPLES, VOCAB, WIDTH, samples

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
_MOE = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 5e5,
}  # fmt: skip
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "qwen3_tied": lambda: Qwen3Config(**(SIZES | {"tie_word_embeddings": True}), head_dim=32),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **_MOE, norm_topk_prob=True),
    "qwen3_moe_raw": lambda: Qwen3MoeConfig(**SIZES, **_MOE, norm_topk_prob=False),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "llama": lambda: LlamaConfig(**SIZES, rope_parameters=_LLAMA3),
}


def main(folder: Path) -> None:
    for name, make in CONFIGS.items():
        write_model(folder, name, make())


def write_model(folder: Path, name: str, config: PretrainedConfig) -> None:
    """Leaves the folder `name`, `name`.gradients beside it, and logits and loss in `name`.pt."""
    batch = samples()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    biases = [buffer for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for tensor in [*model.parameters(), *biases]:
            if tensor.dim() == 1:  # norms of one and biases of zero would hide a mistake
                tensor += 0.2 * torch.randn_like(tensor)
    model.save_pretrained(folder / name)
    logits = torch.zeros(NUM_SAMPLES, WIDTH, VOCAB)
    loss = torch.zeros(())
    for i, length in enumerate(LENGTHS):
        tokens = batch["tokens"][i, :length]
        row = model(tokens[None]).logits[0]
        logits[i, :length] = row.detach()
        chosen = row.log_softmax(-1)[torch.arange(length - 1), tokens[1:]]
        loss = loss - (chosen * batch["advantages"][i, 1:length]).sum() / batch["mask"].sum()
    loss.backward()
    torch.save({"logits": logits, "loss": float(loss)}, folder / f"{name}.pt")
    # written by the model's own saver, gradients get the checkpoint's names and shapes
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(folder / f"{name}.gradients")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
