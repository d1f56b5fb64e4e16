"""Attention of drafts and of their verification for SGLang's backend torch_native, which has
neither.

The last n tokens of each sequence attend at once: one in a decoding batch, a chain of drafts in a
verified one.
"""

import sys

import torch
from torch import Tensor


def attend(
    query: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor, seq_lens: Tensor, **options
) -> Tensor:
    """Returns the output [bs, n, heads, dim] of the last n tokens of sequences of seq_lens tokens,
    themselves included.

    query [bs, n, heads, dim]; slots [bs, longest]: cache slots of a sequence's tokens; options: of
    scaled_dot_product_attention.
    """
    keys = torch.arange(slots.shape[1])
    last = seq_lens[:, None] - query.shape[1] + torch.arange(query.shape[1])
    # slots beyond the end may hold NaN
    slots = torch.where(keys < seq_lens[:, None], slots, slots[:, :1])
    keys_values = (cache[slots].transpose(1, 2).to(query.dtype) for cache in caches)
    visible = keys <= last[:, :, None]
    by_head = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), *keys_values, attn_mask=visible[:, None], **options
    )
    return by_head.transpose(1, 2)


def batch_invariant() -> bool:
    """Returns whether the deterministic mode is on."""
    module = sys.modules.get("sglang.srt.batch_invariant_ops.batch_invariant_ops")
    return getattr(module, "_batch_invariant_MODE", False)


def verify_chains(module) -> None:
    """Patches torch_native: a verified batch has no lengths of its extensions, which are one chain
    a sequence."""
    extend = module.TorchNativeAttnBackend._run_sdpa_forward_extend

    def with_chains(self, query, output, *others, **options):
        k_cache, v_cache, req_to_token, requests, seq_lens, _, lens = others[:7]
        if lens is not None:
            return extend(self, query, output, *others, **options)
        if options.get("sliding_window_size") is not None:
            raise NotImplementedError("drafts with a sliding window on a CPU")
        chains = query.unflatten(0, (len(seq_lens), -1))
        lengths = seq_lens + chains.shape[1]
        settings = {"enable_gqa": options["enable_gqa"], "scale": options["scaling"]}
        # A batch is padded to its longest sequence, on which the last bits of a sum depend.
        parts = (
            [slice(i, i + 1) for i in range(len(chains))] if batch_invariant() else [slice(None)]
        )
        for part in parts:
            slots = req_to_token[requests[part], : int(lengths[part].max())]
            found = attend(chains[part], (k_cache, v_cache), slots, lengths[part], **settings)
            output.unflatten(0, (len(seq_lens), -1))[part] = found
        return output

    module.TorchNativeAttnBackend._run_sdpa_forward_extend = with_chains


def draft_with_torch_native(module) -> None:
    """Patches sglang.srt.speculative.draft_utils, whose tables of attention backends lack
    torch_native."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class DraftStep(TorchNativeAttnBackend):
        """Attends to the sequence and to the drafts of `step` steps before; the batch counts the
        sequence only."""

        prefill_attention_backend_str = decode_attention_backend_str = "torch_native"

        def __init__(self, model_runner, step: int):
            super().__init__(model_runner)
            self.step = step

        def _run_sdpa_forward_decode(self, *tensors, **options):
            *caches, seq_lens, encoder_lens = tensors
            lengths = seq_lens + self.step + 1
            return super()._run_sdpa_forward_decode(*caches, lengths, encoder_lens, **options)

    class DraftSteps:
        """The backends of the steps after the first, which the draft's extension has made."""

        def __init__(self, model_runner, num_steps: int):
            self.attn_backends = [DraftStep(model_runner, step) for step in range(num_steps - 1)]

        def init_forward_metadata(self, forward_batch) -> None:
            for backend in self.attn_backends:
                backend.init_forward_metadata(forward_batch)

    def create_decode_backend(self):
        steps = self.speculative_num_steps
        return DraftSteps(self.draft_model_runner, steps) if steps > 1 else None

    module.DraftBackendFactory.create_decode_backend = create_decode_backend
    # None: the draft model's extensions use the backend of its own runner
    module.DraftBackendFactory.create_draft_extend_backend = lambda self: None


def sample_drafts(module) -> None:
    """Patches sglang.srt.speculative.eagle_utils, which takes the most probable tokens on a CPU at
    any temperature."""
    module._verify_uses_greedy = lambda *, is_all_greedy, **platform: is_all_greedy
