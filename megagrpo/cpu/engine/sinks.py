"""Attention with sinks for SGLang's backend torch_native, which has none, and gpt-oss in the model's
dtype.

A sink is a score of no key, one a head: it takes its share of the softmax (arXiv 2508.10925).
"""

from functools import partial

import torch
from torch import Tensor


def attend(
    sinks: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    enable_gqa: bool = False,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Returns [1, heads, n, d]; arguments as those of scaled_dot_product_attention."""
    repeat = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeat, 1)
    value = value.repeat_interleave(repeat, 1)
    scores = (query @ key.mT).float() * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    none = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, none), -1).softmax(-1)[..., :-1].to(value.dtype) @ value


def take_sinks(module) -> None:
    """Lets a forward of torch_native with sinks use `attend`, one sequence after the other."""
    backend = module.TorchNativeAttnBackend
    one_by_one = backend._run_sdpa_forward_decode

    def taking(forward):
        def with_sinks(self, *arguments, sinks=None, **options):
            if sinks is None:
                return forward(self, *arguments, **options)
            # one scheduler thread forwards: nobody else sees the names meanwhile
            plain = module.scaled_dot_product_attention, backend._run_sdpa_forward_decode
            module.scaled_dot_product_attention = partial(attend, sinks)
            backend._run_sdpa_forward_decode = one_by_one
            found = forward(self, *arguments, **options)
            module.scaled_dot_product_attention, backend._run_sdpa_forward_decode = plain
            return found

        return with_sinks

    backend.forward_extend = taking(backend.forward_extend)
    backend.forward_decode = taking(backend.forward_decode)


def admit_torch_native(module) -> None:
    """SGLang lists the backends with which gpt-oss starts; torch_native takes sinks here, and may
    pass as one of them."""
    chosen = module.attention_backends_of

    def backends(view):
        return tuple("intel_amx" if name == "torch_native" else name for name in chosen(view))

    module.attention_backends_of = backends


def sinks_of_the_model(module) -> None:
    """gpt-oss has its sinks in bfloat16 whatever the model's dtype, which rounds those of a float32
    model."""
    build = module.GptOssAttention.__init__

    def build_in_dtype(self, *arguments, params_dtype=torch.bfloat16, **options):
        build(self, *arguments, params_dtype=params_dtype, **options)
        self.sinks.data = self.sinks.data.to(params_dtype)

    module.GptOssAttention.__init__ = build_in_dtype
