"""Prints the bytes of SGLang's own cache for a model with an indexer, latents and index keys, on this
CPU.

usage: python sparse_pool.py CONFIG_JSON TOKENS, in an engine's environment
"""

import json
import sys
from types import SimpleNamespace

import torch
from sglang.srt.configs.model_config import dsa_layer_skips_topk
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

hf, tokens = json.loads(sys.argv[1]), int(sys.argv[2])
layers = range(hf["num_hidden_layers"])
pool = DSATokenToKVPool(
    tokens,
    page_size=64,  # the only one that it takes on CUDA
    dtype=torch.bfloat16,
    kv_lora_rank=hf["kv_lora_rank"],
    qk_rope_head_dim=hf["qk_rope_head_dim"],
    kv_cache_dim=hf["kv_lora_rank"] + hf["qk_rope_head_dim"],
    layer_num=len(layers),
    device="cpu",
    enable_memory_saver=False,
    index_head_dim=hf["index_head_dim"],
    # as SGLang's kv_cache_configurator.py
    skip_topk_layers=[dsa_layer_skips_topk(SimpleNamespace(**hf), layer) for layer in layers],
)
parts = pool.kv_buffer, pool.index_k_with_scale_buffer
print(json.dumps([sum(tensor.nbytes for tensor in part) for part in parts]))
