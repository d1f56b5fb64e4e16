"""Rotary angles: the frequencies of engines bit by bit, and what of them stays in memory."""

import gc
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from examples.laptop.recipe import TinyModelConfig
from megagrpo.actor.host import prepare_host
from megagrpo.models.config_json import Rotary
from megagrpo.tools.certify.tiny_model import hf_config

prepare_host("cpu")

from megatron.core import tensor_parallel  # noqa: E402  Megatron needs a prepared host
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding  # noqa: E402  likewise

from megagrpo.actor.megatron_config import kernels_here, transformer_config  # noqa: E402  likewise
from megagrpo.config.actor import ActorConfig  # noqa: E402
from megagrpo.models.build import build_chunks  # noqa: E402
from megagrpo.models.kinds.compressed.layer import Turns  # noqa: E402
from megagrpo.models.kinds.grouped_query.layer import PackedSequences  # noqa: E402
from megagrpo.models.kinds.recurrent import _places  # noqa: E402
from megagrpo.models.layers.rotary import section_angles  # noqa: E402
from megagrpo.models.table import architecture_of  # noqa: E402
from tests.pretended_world import META, pretended_world  # noqa: E402

DIM = 64


def engine_frequencies(theta: float, yarn: dict | None = None) -> torch.Tensor:
    """As SGLang's precompute_freqs_cis (kernels/ops/attention/deepseek_v4_rope.py)."""
    freqs = 1.0 / (theta ** (torch.arange(0, DIM, 2, dtype=torch.float32) / DIM))
    if yarn is None:
        return freqs
    borders = [
        DIM * math.log(yarn["original_max_position_embeddings"] / (beta * 2 * math.pi)) / (2 * math.log(theta))
        for beta in (yarn["beta_fast"], yarn["beta_slow"])
    ]
    low, high = max(math.floor(borders[0]), 0), min(math.ceil(borders[1]), DIM - 1)
    smooth = 1 - ((torch.arange(DIM // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return freqs / yarn["factor"] * (1 - smooth) + freqs * smooth


@pytest.mark.parametrize("factor", [None, 16.0])
def test_compressed_attention_turns_by_the_engines_frequencies(factor: float | None):
    yarn = None
    if factor is not None:
        yarn = {
            "type": "yarn", "factor": factor, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        }  # fmt: skip
    assert torch.equal(Turns(Rotary(160000.0, yarn), DIM)._frequencies, engine_frequencies(160000.0, yarn))


def test_frequencies_wait_for_no_device(monkeypatch):
    """A copy from the host would, in every layer and block."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: META)
    turns = Turns(Rotary(160000.0), DIM)
    assert turns._frequencies.device == META


@pytest.mark.parametrize("kind", [RotaryEmbedding, YarnRotaryEmbedding])
def test_angles_of_one_length_stay_in_memory(kind: type):
    """Each micro-batch has another longest sample, and no plan counts angles."""
    rotary = kind(DIM, rotary_percent=1.0, use_cpu_initialization=True)

    def angles(length: int) -> torch.Tensor:
        found = rotary(length, packed_seq=True)
        return found[0] if isinstance(found, tuple) else found

    longest = angles(200).clone()
    held = []
    for length in range(100, 110):
        assert torch.equal(angles(length), longest[:length])
        held.append(weakref.ref(angles(length)))
    gc.collect()
    assert sum(table() is not None for table in held) <= 1


def test_angles_of_images_are_the_engines():
    position = 262143
    positions = torch.full((3, 1, 1), position)
    angles = section_angles(positions, DIM, 1e6, (12, 10, 10), interleaved=True).flatten()
    assert torch.equal(angles[: DIM // 2], position * engine_frequencies(1e6))


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that is made inside."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numbers = max(self.numbers, out.numel())
        return out


def test_places_of_recurrent_layers_are_as_many_as_tokens():
    """Not as many as samples times the longest: one long sample is among many short ones."""
    lengths = [4] * 100 + [1024]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSequences.make(bounds, lengths, 2)
    packed.cp_group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with _Largest() as largest:
        places = _places(sum(lengths) // 2, packed)
    assert largest.numbers == sum(lengths)
    assert torch.equal(places.sort().values, torch.arange(sum(lengths)))


def test_layers_without_an_indexer_are_told_apart_in_checkpoints():
    """Without dense layers Megatron takes layers for alike, and misses the indexers of those that share a choice."""
    shared = {"index_topk_freq": 2, "index_skip_topk_offset": 1, "first_k_dense_replace": 0}
    arch = architecture_of(hf_config(TinyModelConfig(path="x", family="glm_moe_dsa")) | shared)
    config = ActorConfig(device="cpu")
    with pretended_world(config, 0), META:
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        kernels = kernels_here(config)
        [chunk] = build_chunks(arch, config, transformer_config(arch, config, kernels), kernels, META)
        state = chunk.sharded_state_dict(prefix="")
    keys = sorted(part.key for name, part in state.items() if name.endswith("indexer.wk.weight"))
    assert keys == [f"decoder.layers.{layer}.self_attention.core_attention.indexer.wk.weight" for layer in (0, 2)]
