"""SGLang's own models in FP8 in this process, one rank: python -m tests.e2e.fp8_in_process FOLDER FAMILY.

The stand-ins for a CPU must come first on PYTHONPATH. Prints what `main` returns as JSON.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
from sglang.srt.distributed import bootstrap, parallel_state
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import get_model_architecture, set_default_torch_dtype
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
from sglang.srt.server_args import ServerArgs, prepare_server_args
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_engine import FakeEngine, exchange_config, running
from safetensors import safe_open

from examples.laptop.model import write_model
from examples.laptop.recipe import TinyModelConfig
from megagrpo.cpu.engine import block_fp8
from megagrpo.mesh import LeaderError, make_mesh
from megagrpo.models.families.deepseek_v3 import DeepseekV3
from megagrpo.models.table import FAMILIES, architecture_of, model_tensors
from megagrpo.rollout.service.engine_model import as_engines_see_it
from megagrpo.system.environment import temporarily
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.certify.tiny_model import hf_config, random_tensors
from megagrpo.weights.actor_weights import ActorWeights, fixed_dtypes
from megagrpo.weights.copies.recorder import record_whole
from megagrpo.weights.exchange import Exchange
from tests.fp8_checkpoint import quantize_folder
from tests.pretended_groups import only_fake_groups
from tests.published import published_config

VOCAB = 131
SIZES = {"hidden_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "ffn_size": 256}


class PlainActor:
    """Parameters that are the HF tensors."""

    def __init__(self, hf: dict, tensors: dict[str, torch.Tensor]):
        specs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        self.live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        described = list(model_tensors(architecture_of(hf)))
        fp8 = frozenset(spec.name for spec in described if spec.in_fp8)
        copies, fixed = record_whole(self.load, specs, self.live).copies, fixed_dtypes(described)
        self.weights = ActorWeights(copies, specs, lambda: self.live, fixed_dtypes=fixed, fp8=fp8)

    def load(self, hf) -> None:
        for name, tensor in self.live.items():
            tensor.copy_(hf[name])


def built(config) -> torch.nn.Module:
    """A model of SGLang with memory, processed after loading as a start with random weights processes it."""
    get_model_architecture(config)
    with set_default_torch_dtype(config.dtype):
        model = _initialize_model(config, LoadConfig(), _get_quantization_config(config, LoadConfig()))
    processed(model)
    return model


def processed(model: torch.nn.Module) -> None:
    for module in model.modules():
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)


def differing(model: torch.nn.Module, reference: torch.nn.Module) -> list[str]:
    wanted = dict(reference.named_parameters())
    return [
        name
        for name, held in model.named_parameters()
        if held.dtype != wanted[name].dtype
        or not torch.equal(held.data.view(-1).view(torch.uint8), wanted[name].data.view(-1).view(torch.uint8))
    ]


def layer_outputs(model: torch.nn.Module) -> dict[str, float]:
    """Relative distance of a fused projection, and of the experts, to products with the dequantized weights."""
    layer, draw = model.model.layers[1], torch.Generator().manual_seed(3)
    x = torch.randn(5, SIZES["hidden_size"], generator=draw).bfloat16()
    qkv, experts = layer.self_attn.qkv_proj, layer.mlp.experts
    exact = x.float() @ block_fp8.dequantized(qkv.weight, qkv.weight_scale_inv, [128, 128]).t()
    found = {"qkv": qkv(x)[0].float() - exact}
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [1, 6]], dtype=torch.int32)
    shares = torch.full((5, 2), 0.5)
    out = experts(x.clone(), StandardTopKOutput(shares, ids, torch.zeros(5, 8))).float()
    wanted = torch.zeros_like(out)
    for token, chosen in enumerate(ids.tolist()):
        for one in chosen:
            w13 = block_fp8.dequantized(experts.w13_weight[one], experts.w13_weight_scale_inv[one], [128, 128])
            w2 = block_fp8.dequantized(experts.w2_weight[one], experts.w2_weight_scale_inv[one], [128, 128])
            gate, up = (w13 @ x[token].float()).chunk(2)
            wanted[token] += 0.5 * (w2 @ (torch.nn.functional.silu(gate) * up))
    found["experts"] = out - wanted
    norms = {"qkv": exact.norm(), "experts": wanted.norm()}
    return {name: float(difference.norm() / norms[name]) for name, difference in found.items()}


@contextmanager
def pretended_engine(server: ServerArgs) -> Iterator[ModelConfig]:
    """Initializes SGLang as its scheduler process does before building the model, for one rank.

    Indexers are built as on a Hopper. This process is not used for anything else.
    """
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    dsa_indexer._is_cuda, dsa_indexer.deep_gemm = True, SimpleNamespace(get_num_sms=lambda: 132)
    publish(server, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    config = ModelConfig.from_server_args(server)
    adjust_config_with_unaligned_cpu_tp(config, LoadConfig(), 1)
    initialize_moe_config()
    try:
        with only_fake_groups():  # SGLang adds gloo groups to every one
            dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
            parallel_state.init_distributed_environment(
                backend="fake", world_size=1, rank=0, local_rank=0, distributed_init_method="unused"
            )
            parallel_state.initialize_model_parallel()
        initialize_dp_attention(server_args=server)
        bootstrap.init_layer_runtime(model_config=config)
        yield config
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        reset_context()


def described(folder: Path, family: str) -> tuple[TinyModelConfig, dict]:
    """Sizes of whole blocks, and config.json."""
    latent = {"hidden_size": 512, "num_kv_heads": 4, "head_dim": 32}
    own = latent if isinstance(FAMILIES[family], DeepseekV3) else {}
    sizes = TinyModelConfig(path=str(folder / "model"), family=family, expert_ffn_size=128, **(SIZES | own))
    hf = hf_config(sizes) | {"vocab_size": VOCAB}
    if "linear_num_key_heads" in hf:  # one layer of each kind
        hf |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
        hf |= {"layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2}
    if family == "glm_moe_dsa":  # as published; SGLang then joins two matrices of its indexer
        hf |= {"indexer_rope_interleave": True}
    if f"{family}_text" in FAMILIES:
        hf = published_config(hf | {"model_type": f"{family}_text"})
    return sizes, hf


def main(folder: Path, family: str) -> dict:
    sizes, hf = described(folder, family)
    tensors = random_tensors(architecture_of(hf), torch.Generator().manual_seed(0))
    write_model(folder / "model", hf, tensors, sizes.alphabet)
    quantize_folder(folder / "model", folder / "fp8", folder / "twin", (128, 128))
    stored = [safe_open(file, "pt") for file in sorted((folder / "fp8").glob("*.safetensors"))]
    actor, mesh, found = PlainActor(hf, tensors), make_mesh(0, 1, torch.device("cpu"), 200.0), {}
    sections = {"rollout": {"quantization": "fp8", "dtype": "bfloat16"}, "actor": {"device": "cpu"}}

    def config_of(transport: str):
        weights = {"transport": transport, "bucket_mb": 0.5, "timeout_s": 150.0}
        return exchange_config(folder, folder / "model", weights=weights, **sections)

    seen = as_engines_see_it(config_of("reshard"), RunFolder(folder / "run"))
    words = ["--model-path", seen.model.path, "--load-format", "dummy", "--dtype", "bfloat16", "--device", "cpu"]
    load_plugins()
    words += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    words += ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"]
    server = prepare_server_args(words)

    def read(model: torch.nn.Module, files) -> None:
        names = [(name, file) for file in files for name in file.keys()]  # noqa: SIM118
        model.load_weights([(name, file.get_tensor(name)) for name, file in names])
        processed(model)

    with pretended_engine(server) as description, tempfile.TemporaryDirectory() as scratch:
        reference, model = built(description), built(description)
        read(reference, stored)
        found["outputs"] = layer_outputs(reference) if family == "qwen3_moe" else {}
        engine = FakeEngine(models=[model])
        disk = "/update_weights_from_disk"
        engine.more[disk] = lambda body: read(
            model, [safe_open(file, "pt") for file in Path(body["model_path"]).glob("*.safetensors")]
        )
        with running(engine):
            for version, transport in enumerate(("reshard", "disk"), 1):
                exchange = Exchange(config_of(transport), mesh, actor.weights, engine, Path(scratch))
                actor.load({name: -tensor for name, tensor in tensors.items()})
                exchange.publish(2 * version - 1)
                found[f"{transport}, others"] = len(differing(model, reference))
                actor.load(tensors)
                report = exchange.publish(2 * version)
                found[transport] = differing(model, reference)
                found[f"{transport}, bytes"] = report["wire_bytes"]
                exchange.verify()
                exchange.close()
        found["parameters"] = len(list(model.parameters()))
        padding = 2 * (model.lm_head.weight.shape[0] - VOCAB) * sizes.hidden_size  # of two vocabularies
        found["bytes"] = sum(  # in float32 there, published in bfloat16: some routers and norms
            p.numel() * 2 if name.endswith((".gate.weight", "linear_attn.norm.weight")) else p.nbytes
            for name, p in model.named_parameters()
            if p.dim()
        )
        found["bytes"] -= 2 * padding
        with temporarily("SGLANG_FP8_IGNORED_LAYERS", "model.layers.1.self_attn.o_proj"):
            exempting = FakeEngine(models=[built(description)])
        with running(exempting):
            exchange = Exchange(config_of("reshard"), mesh, actor.weights, exempting, Path(scratch))
            try:
                exchange.publish(1)
            except (LeaderError, ValueError) as exc:
                found["exempted"] = str(exc)
            exchange.close()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
