"""Models with random weights and batches of random tokens, made where they are needed: no file, no
download."""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megagrpo.actor.host import prepare_host

DEVICE = prepare_host()  # comes first: it prepares the host for Megatron

# isort: split

from megagrpo.actor.megatron_actor import MegatronActor  # noqa: E402
from megagrpo.batching.updates import one_pass  # noqa: E402
from megagrpo.config.algorithm import AlgorithmConfig  # noqa: E402
from megagrpo.config.schema import ActorConfig, OptimizerConfig  # noqa: E402
from megagrpo.models.architecture import Architecture  # noqa: E402
from megagrpo.models.table import model_tensors  # noqa: E402
from megagrpo.tools.certify.measure import joined  # noqa: E402
from megagrpo.tools.certify.tiny_model import TinySizes, hf_config  # noqa: E402
from megagrpo.types import Batch, Rewards  # noqa: E402

# Everything that a loss can have: the reference's KL, an entropy bonus, a clip.
RICH = AlgorithmConfig.model_validate(
    {
        "kl": {"loss_coef": 0.1},
        "entropy_coef": 0.01,
        "aggregation": "seq-mean-token-mean",
        "loss": {"name": "ppo_clip"},
    }
)
# What most runs take.
PLAIN = AlgorithmConfig.model_validate({"loss": {"name": "ppo_clip"}, "aggregation": "token-mean"})
QWEN3_1_7B = {
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
QWEN3_1_7B |= {"head_dim": 128, "intermediate_size": 6144, "vocab_size": 151_936}
QWEN3_TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN3_TINY |= {"head_dim": 16, "intermediate_size": 128, "vocab_size": 512}


def description(family: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json of a model of these sizes."""
    common = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32_768,
    }
    common |= {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    common |= {"use_sliding_window": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    named = {
        "architectures": hf_config(TinySizes(family=family))["architectures"],
        "model_type": family,
    }
    return {**named, **common, **sizes}


class RandomTensors(Mapping[str, Tensor]):
    """The tensors of a model by their HF names, drawn when they are read: the same ones every time.

    Values are rounded to bfloat16, so that models of any dtype have the same. spread: standard
    deviation of the logits, which is the last norm's weight; those of a trained model spread by
    about 4. drawn_on: the device of the generator, by default the same. One seed gives other values
    on a GPU than on a CPU, so models of both are drawn on the CPU.
    """

    def __init__(
        self,
        arch: Architecture,
        device: torch.device,
        spread: float = 1.0,
        drawn_on: torch.device | None = None,
    ):
        self._specs, self._device, self._spread = (
            {spec.name: spec for spec in model_tensors(arch)},
            device,
            spread,
        )
        self._drawn_on = drawn_on or device

    def __getitem__(self, name: str) -> Tensor:
        spec = self._specs[name]
        if spec.kind == "norm":
            return torch.full(
                spec.shape,
                self._spread if name == "model.norm.weight" else 1.0,
                device=self._device,
            )
        if spec.kind == "bias":
            return torch.zeros(spec.shape, device=self._device)
        generator = torch.Generator(self._drawn_on).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(spec.shape, generator=generator, device=self._drawn_on)
        return (values * spec.shape[-1] ** -0.5).bfloat16().float().to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


@contextmanager
def random_actor(
    folder: Path,
    config_json: dict[str, Any],
    spread: float = 1.0,
    lr: float = 1e-5,
    drawn_on: torch.device | None = None,
    **options: Any,
) -> Iterator[MegatronActor]:
    """Makes an actor with RandomTensors, in a world of its own. options: of ActorConfig. `folder`:
    not used before."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_json))
    config = ActorConfig(deadline_s=120.0, **options)
    optimizer = OptimizerConfig(lr=lr, clip_grad=1.0)
    with joined(
        folder / "store", config=config, optimizer=optimizer, model_path=str(folder), device=DEVICE
    ) as actor:
        actor.load_hf(RandomTensors(actor.arch, DEVICE, spread, drawn_on))
        actor.weights_loaded()
        yield actor


def random_batch(vocab: int, lengths: Sequence[int], prompt: int, seed: int = 0) -> Batch:
    """Returns samples of random tokens, each a group of its own and all of one update.

    lengths: of prompt and response together, tokens. A hole in the first sample's mask stands for a
    tool's answer.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, length = len(lengths), torch.tensor(lengths)
    column = torch.cat([torch.arange(n) for n in lengths])
    mask = column >= prompt
    mask[prompt + 2 : prompt + 4] = False
    logprobs = (-6.0 + 0.2 * torch.randn(len(mask), generator=generator)) * mask
    ids = torch.arange(rows)
    return Batch(
        sample_ids=ids,
        group_ids=ids,
        num_groups=rows,
        tokens=torch.randint(3, vocab, (len(mask),), generator=generator, dtype=torch.int32),
        lengths=length,
        prompt_lengths=torch.full((rows,), prompt),
        loss_mask=mask,
        rollout_logprobs=logprobs,
        rewards=Rewards(torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.bool)),
        truncated=torch.zeros(rows, dtype=torch.bool),
        advantages=torch.randn(rows, generator=generator).repeat_interleave(length) * mask,
        old_logprobs=logprobs,
        ref_logprobs=logprobs * 1.02,
        updates=one_pass(rows),
    )
