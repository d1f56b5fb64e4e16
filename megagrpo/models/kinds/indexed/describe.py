"""The indexer of DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, 2.1) by its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.models.config_json import HfConfig
from megagrpo.models.costs import FP32

_SCALED = 128  # numbers of an engine's key with one scale


@dataclass(frozen=True)
class LightningIndexer:
    """Holds the sizes of what chooses keys in latent attention."""

    heads: int
    head_dim: int
    topk: int  # keys that each query sees; sequences of as many tokens are dense
    in_pairs: bool  # its rotary embedding turns neighbours; else, as usual, halves
    # Layers from `offset` on choose every `freq`-th time, and share that choice until the next
    # (IndexShare, arXiv 2603.12201); both count from 1.
    freq: int = 1
    offset: int = 1

    @classmethod
    def read(cls, hf: HfConfig) -> LightningIndexer:
        """Reads a config.json that has its keys."""
        freq = hf.get("index_topk_freq") or 1
        return cls(
            heads=hf["index_n_heads"],
            head_dim=hf["index_head_dim"],
            topk=hf["index_topk"],
            in_pairs=bool(hf.get("indexer_rope_interleave")),
            freq=freq,
            # transformers' and SGLang's default; without sharing nothing depends on it
            offset=(hf.get("index_skip_topk_offset") or 2) if freq > 1 else 1,
        )

    def source(self, index: int) -> int:
        """Returns the layer, counted from 0, whose choice layer `index` sees: itself, or one before."""
        return index - max(index + 1 - self.offset, 0) % self.freq

    def key_bytes(self, num_layers: int) -> int:
        """Returns the bytes of one token in one rank's cache that it reads: a key in FP8 with its
        scales, for each layer that chooses (SGLang's mem_cache/memory_pool.py,
        DSATokenToKVPool)."""
        choosing = sum(self.source(index) == index for index in range(num_layers))
        return choosing * (self.head_dim + self.head_dim // _SCALED * FP32)
