"""Reads parameter lists of Transformer Engine from its source, or from the stand-in's, without
importing either.

usage: python -m tests.stand_ins.signatures FOLDER VERSION   writes
tests/stand_ins/transformer_engine.json from FOLDER, where `pip download --no-deps
transformer_engine==VERSION` was unpacked.
"""

import ast
import json
import sys
from pathlib import Path

TABLE = Path(__file__).parent / "transformer_engine.json"
STAND_IN = Path(__file__).parent / "transformer_engine"
# what Megatron's wrappers, optimizers and routers call -> files of the released package
FILES = {
    "Linear.__init__": "pytorch/module/linear.py",
    "Linear.forward": "pytorch/module/linear.py",
    "LayerNormLinear.__init__": "pytorch/module/layernorm_linear.py",
    "LayerNormLinear.forward": "pytorch/module/layernorm_linear.py",
    "GroupedLinear.__init__": "pytorch/module/grouped_linear.py",
    "GroupedLinear.forward": "pytorch/module/grouped_linear.py",
    "RMSNorm.__init__": "pytorch/module/rmsnorm.py",
    "TransformerEngineBaseModule.set_tensor_parallel_group": "pytorch/module/base.py",
    "TransformerEngineBaseModule.init_fp8_metadata": "pytorch/module/base.py",
    "TransformerEngineBaseModule.backward_dw": "pytorch/module/base.py",
    "get_dummy_wgrad": "pytorch/module/base.py",
    "DotProductAttention.__init__": "pytorch/attention/dot_product_attention/dot_product_attention.py",
    "DotProductAttention.forward": "pytorch/attention/dot_product_attention/dot_product_attention.py",
    "DotProductAttention.set_context_parallel_group": (
        "pytorch/attention/dot_product_attention/dot_product_attention.py"
    ),
    "apply_rotary_pos_emb": "pytorch/attention/rope.py",
    "activation_recompute_forward.__init__": "pytorch/distributed.py",
    "checkpoint": "pytorch/distributed.py",
    "CudaRNGStatesTracker.add": "pytorch/distributed.py",
    "CudaRNGStatesTracker.fork": "pytorch/distributed.py",
    "CudaRNGStatesTracker.set_states": "pytorch/distributed.py",
    "fp8_autocast": "pytorch/quantization.py",
    "fp8_model_init": "pytorch/quantization.py",
    "FusedAdam.__init__": "pytorch/optimizers/fused_adam.py",
    "FusedAdam.step": "pytorch/optimizers/fused_adam.py",
    "FusedAdam.zero_grad": "pytorch/optimizers/fused_adam.py",
    "FusedAdam.initialize_state": "pytorch/optimizers/fused_adam.py",
    "FusedAdam._initialize_state": "pytorch/optimizers/fused_adam.py",
    "FusedAdam.get_unscaled_state": "pytorch/optimizers/fused_adam.py",
    "FusedAdam.set_scaled_state": "pytorch/optimizers/fused_adam.py",
    "MultiTensorApply.__call__": "pytorch/optimizers/multi_tensor_apply.py",
    "fused_topk_with_score_function": "pytorch/router.py",
    "fused_compute_score_for_moe_aux_loss": "pytorch/router.py",
    "fused_moe_aux_loss": "pytorch/router.py",
    "moe_permute": "pytorch/permutation.py",
    "moe_permute_with_probs": "pytorch/permutation.py",
    "moe_unpermute": "pytorch/permutation.py",
    "moe_sort_chunks_by_index": "pytorch/permutation.py",
    "moe_sort_chunks_by_index_with_probs": "pytorch/permutation.py",
}


def parameters(tree: ast.AST, name: str) -> list[str] | None:
    """Of a function, or of a method "Class.method": its parameters with their defaults, as text; None if not there."""
    owner, _, method = name.rpartition(".")
    body = tree.body
    if owner:
        classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
        body = classes[0].body if classes else []
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == method]
    return _as_text(found[0].args) if found else None


def _as_text(arguments: ast.arguments) -> list[str]:
    names = [one.arg for one in arguments.args]
    defaults = [None] * (len(names) - len(arguments.defaults)) + arguments.defaults
    words = [_with_default(name, default) for name, default in zip(names, defaults, strict=True)]
    if arguments.vararg or arguments.kwonlyargs:
        words.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    words += [_with_default(one.arg, default) for one, default in named]
    return [*words, f"**{arguments.kwarg.arg}"] if arguments.kwarg else words


def _with_default(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"


def released(folder: Path) -> dict[str, list[str] | None]:
    """The parameters in an unpacked source; `folder` holds `pytorch`."""
    return {name: parameters(ast.parse((folder / file).read_text()), name) for name, file in FILES.items()}


def stand_ins() -> dict[str, list[str] | None]:
    """The parameters in the stand-in, whatever its files are called."""
    trees = [ast.parse(path.read_text()) for path in sorted(STAND_IN.rglob("*.py"))]
    return {
        name: next((found for tree in trees if (found := parameters(tree, name)) is not None), None) for name in FILES
    }


if __name__ == "__main__":
    source = Path(sys.argv[1])
    source = source / "transformer_engine" if (source / "transformer_engine").is_dir() else source
    TABLE.write_text(json.dumps({"version": sys.argv[2], "parameters": released(source)}, indent=1) + "\n")
