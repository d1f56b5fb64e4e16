"""Python runs this file in every process that has its folder on PYTHONPATH: an engine and the
processes it starts.

It imports nothing heavy. It patches the modules in REPAIRS right after their import, for the reason
in each function's docstring. Written against sglang 0.5.21 and torch 2.13.0.
"""

import importlib
import importlib.abc
import importlib.util
import sys

_REGISTERS = 128  # elements: a multiple of what torch's loops on a CPU compute at once


def torchvision_operators(module) -> None:
    """torchvision registers shapes for two operators that a wheel linked to CUDA lacks on a CPU,
    and fails."""
    from megagrpo.cpu.torchvision_ops import define_torchvision_operators

    define_torchvision_operators()


def plain_host_buffers(module) -> None:
    """The default allocator of host buffers calls cudaHostRegister; used when routed experts are
    returned."""
    import torch

    def allocate(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
        return torch.empty(dims, dtype=dtype, device="cpu")

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def no_cuda_synchronize(module) -> None:
    """/weights_checker waits for the GPU around its sums, even on a machine without one."""
    import torch

    torch.cuda.synchronize = lambda device=None: None


def skip_remote_experts(module) -> None:
    """Expert parallel marks an expert of another rank by id -1; the torch fallback would count it
    as an index."""
    run_local = module.moe_forward_native

    def moe_forward_native(layer, x, topk_output, moe_runner_config):
        experts = topk_output.topk_ids.reshape(-1)
        local = (experts >= 0).nonzero().squeeze(-1)
        if local.numel() == experts.numel():
            return run_local(layer, x, topk_output, moe_runner_config)
        out = x.new_zeros(x.shape)
        if local.numel():
            # Each (token, local expert) pair becomes a row with one expert; the rows of a token are
            # added up again.
            weights = topk_output.topk_weights.reshape(-1)
            pairs = topk_output._replace(
                topk_ids=experts[local, None], topk_weights=weights[local, None]
            )
            tokens = local // topk_output.topk_ids.shape[1]
            out.index_add_(0, tokens, run_local(layer, x[tokens], pairs, moe_runner_config))
        return out

    module.moe_forward_native = moe_forward_native


def native_experts(module) -> None:
    """Makes torch's experts those of every model here."""
    skip_remote_experts(module)
    repair_of("mamba2", "squared_relu_experts")(module)


def allow_deterministic_attention(module) -> None:
    """Adds torch_native, which attends one sequence at a time, to the list of batch-invariant
    backends."""
    module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def decode_in_one_call(module) -> None:
    """torch_native attends one sequence of a decoding batch after the other, in Python. Here all
    attend at once, over keys padded to the longest. Not in the deterministic mode: the padding
    depends on the rest of the batch."""
    from megagrpo.cpu.engine.draft_attention import attend, batch_invariant, verify_chains
    from megagrpo.cpu.engine.sinks import take_sinks

    take_sinks(module)
    one_by_one = module.TorchNativeAttnBackend._run_sdpa_forward_decode

    def decode(self, query, output, *others, **options):
        k_cache, v_cache, req_to_token, requests, seq_lens, encoder_lens = others
        window = options.get("sliding_window_size")
        plain = encoder_lens is None and not options.get("causal")
        if not plain or (window is not None and window > -1) or batch_invariant():
            return one_by_one(self, query, output, *others, **options)
        slots = req_to_token[requests, : int(seq_lens.max())]
        settings = {"enable_gqa": options.get("enable_gqa", False), "scale": options.get("scaling")}
        output[:] = attend(query[:, None], (k_cache, v_cache), slots, seq_lens, **settings)[:, 0]
        return None

    module.TorchNativeAttnBackend._run_sdpa_forward_decode = decode
    verify_chains(module)
    # With data-parallel attention a batch is padded by requests of one token, which needs this
    # backend's own length.
    module.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def no_nccl(module) -> None:
    """A build of torch for CUDA brings NCCL, by which ranks would make communicators of GPUs that
    are not there."""

    def library(path=None):
        raise OSError("NCCL without a GPU")

    module.NCCLLibrary = library


def reduce_scatter_without_nccl(module) -> None:
    """Data-parallel attention with expert parallelism adds up the experts' parts by NCCL only. Here
    they are all reduced and cut, as SGLang does in the deterministic mode."""

    def reduce_scatterv(self, input_, output=None, sizes=None):
        return self._deterministic_reduce_scatterv(input_, output, sizes)

    module.GroupCoordinator.reduce_scatterv = reduce_scatterv


def batch_invariant_products(module) -> None:
    """The deterministic mode replaces matrix products by Triton kernels. Here each row is
    multiplied separately, so that its sums do not depend on the rest of the batch. Sigmoids of a
    router's scores have other bits in a vector register than one by one, as the last ones of a
    tensor are computed; padded, all are in registers."""
    import torch

    def mm(a, b):
        out = a.new_empty((a.shape[0], b.shape[1]))
        for i in range(a.shape[0]):
            torch.ops.aten.mm.out(a[i : i + 1], b, out=out[i : i + 1])
        return out

    def addmm(bias, a, b, beta=1, alpha=1):
        return mm(a, b) * alpha + bias * beta

    def sigmoid(values):
        flat = values.flatten()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % _REGISTERS))
        return torch.ops.aten.sigmoid.out(padded, out=torch.empty_like(padded))[
            : len(flat)
        ].view_as(values)

    def enable_batch_invariant_mode(enable_bmm=True):
        if module._batch_invariant_MODE:
            return
        module._batch_invariant_MODE = True
        module._batch_invariant_LIB = torch.library.Library("aten", "IMPL")
        module._batch_invariant_LIB.impl("aten::mm", mm, "CPU")
        module._batch_invariant_LIB.impl("aten::addmm", addmm, "CPU")
        module._batch_invariant_LIB.impl("aten::sigmoid", sigmoid, "CPU")

    module.enable_batch_invariant_mode = enable_batch_invariant_mode


def fork_processes(module) -> None:
    """SGLang spawns its processes because CUDA does not survive a fork. Each imports SGLang anew: 8 s
    of a core, and 500 MB. Without CUDA they are forked from the server, which has imported it."""
    import multiprocessing

    prepare = module._set_envs_and_config

    def prepare_and_fork(*arguments, **options):
        prepare(*arguments, **options)
        multiprocessing.set_start_method("fork", force=True)

    module._set_envs_and_config = prepare_and_fork


def no_amx(module) -> None:
    """With AMX, SGLang takes paths that need the compiled sgl_kernel, which is not installed."""
    module.cpu_has_amx_support = lambda: False


def absorb_latent_attention(module) -> None:
    """For an unregistered backend DeepSeek's attention uses Triton's form: a fresh prefill expands
    keys and values. torch_native reads them from the cache, which holds latents. The absorbed form,
    which decoding and the deterministic mode use anyway, multiplies these latents."""
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


def rotary_embedding_without_scaling(module) -> None:
    """On a CPU DeepSeek's rotary embedding asserts YaRN scaling; Moonlight has none. The common
    embedding, which other devices use, computes both."""
    with_yarn = module.get_rope_wrapper

    def get_rope_wrapper(*sizes, rope_scaling=None, device=None, **options):
        if rope_scaling is None:
            device = None
        return with_yarn(*sizes, rope_scaling=rope_scaling, device=device, **options)

    module.get_rope_wrapper = get_rope_wrapper


def repair_of(name: str, function: str):
    """Returns a repair that is in a module beside this one, which imports torch."""
    return lambda module: getattr(importlib.import_module(f"megagrpo.cpu.engine.{name}"), function)(
        module
    )


def latents_as_on_a_gpu(module) -> None:
    """On a CPU the matrices of an FP8 model's latent attention would have one scale each, and a
    dtype of their own. On a GPU they are multiplied by the scales of their blocks."""
    import torch

    dequantized = module.block_quant_dequant
    module._is_xpu = True  # read nowhere else in this module
    module.block_quant_dequant = lambda *arguments: dequantized(*arguments).to(
        torch.get_default_dtype()
    )


def copies_between_tiers(module) -> None:
    """Of a hierarchical cache a kernel copies keys and values between the engine's memory and the
    host's."""

    def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices] = source[src_indices]

    module.transfer_kv_direct = transfer_kv_direct


def small_hosts(module) -> None:
    """SGLang keeps 10 GiB of host memory free beside a hierarchical cache; a laptop may have no
    more."""
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


REPAIRS = {
    "torchvision.extension": torchvision_operators,
    "sglang.srt.utils.common": no_amx,
    "sglang.srt.entrypoints.engine": fork_processes,
    "sglang.srt.mem_cache.pool_host.base": small_hosts,
    "sglang.srt.mem_cache.pool_host.common": plain_host_buffers,
    "sglang.srt.mem_cache.pool_host.mha": copies_between_tiers,
    "sglang.srt.mem_cache.pool_host.mla": copies_between_tiers,
    "sglang.srt.distributed.device_communicators.pynccl": no_nccl,
    "sglang.srt.distributed.parallel_state": reduce_scatter_without_nccl,
    "sglang.srt.utils.weight_checker": no_cuda_synchronize,
    "sglang.srt.layers.rotary_embedding.factory": rotary_embedding_without_scaling,
    "sglang.srt.layers.moe.fused_moe_native": native_experts,
    "sglang.srt.layers.quantization.fp8": repair_of("block_fp8", "install"),
    "sglang.srt.layers.attention.torch_native_backend": decode_in_one_call,
    "sglang.srt.arg_groups.choices": allow_deterministic_attention,
    "sglang.srt.models.deepseek_common.deepseek_weight_loader": latents_as_on_a_gpu,
    "sglang.srt.models.deepseek_common.attention_backend_handler": absorb_latent_attention,
    "sglang.srt.batch_invariant_ops.batch_invariant_ops": batch_invariant_products,
    "sglang.kernels.ops.attention.fla.layernorm_gated": repair_of("gated_delta", "norm_then_gate"),
    "sglang.kernels.ops.attention.fla.fused_norm_gate": repair_of("gated_delta", "norm_then_gate"),
    "sglang.srt.layers.attention.linear.kernels.kda_triton": repair_of(
        "gated_delta", "kimi_delta_rule"
    ),
    "sglang.srt.layers.attention.linear.kda_backend": repair_of("gated_delta", "kimi_convolution"),
    "sglang.srt.models.kimi_linear": repair_of("gated_delta", "scaled_experts"),
    "sglang.kernels.ops.elementwise.elementwise": repair_of("gated_delta", "gate_shared_experts"),
    "sglang.srt.arg_groups.model_hook": repair_of("sinks", "admit_torch_native"),
    "sglang.srt.models.gpt_oss": repair_of("sinks", "sinks_of_the_model"),
    "sglang.srt.layers.attention.mamba.mamba": repair_of("mamba2", "scan"),
    "sglang.srt.models.nemotron_h": repair_of("mamba2", "router_in_float32"),
    "sglang.srt.models.minimax_m2": repair_of("head_norms", "install"),
    "sglang.srt.speculative.draft_utils": repair_of("draft_attention", "draft_with_torch_native"),
    "sglang.srt.speculative.eagle_utils": repair_of("draft_attention", "sample_drafts"),
}


class RepairingFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in REPAIRS:
            return None
        repair = REPAIRS.pop(name)  # popped first: the next line calls this function again
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_repair(module):
                execute(module)
                repair(module)

            spec.loader.exec_module = execute_and_repair
        return spec


sys.meta_path.insert(0, RepairingFinder())
