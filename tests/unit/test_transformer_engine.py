"""The stand-in for Transformer Engine has the released package's parameters; what Megatron does with and without it."""

import importlib.util
import json
from pathlib import Path

import pytest

from megagrpo.system import environment
from tests.experiments import python
from tests.stand_ins.signatures import FILES, STAND_IN, TABLE, released, stand_ins

TABLE_OF_RELEASED = json.loads(TABLE.read_text())


def run(code: str) -> list[str]:
    """What a process prints that could import the stand-in."""
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return python("-c", code, env=environment.child_environment(variables, [str(STAND_IN.parent)])).split()


@pytest.mark.parametrize("name", FILES)
def test_the_stand_in_takes_what_the_released_package_takes(name: str):
    expected = TABLE_OF_RELEASED["parameters"][name]
    assert expected is not None and stand_ins()[name] == expected


def test_its_version_is_that_of_the_table():
    assert f'__version__ = "{TABLE_OF_RELEASED["version"]}"' in (STAND_IN / "__init__.py").read_text()


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)
def test_the_installed_package_takes_the_same():
    spec = importlib.util.find_spec("transformer_engine")
    found = released(Path(spec.submodule_search_locations[0]))
    assert found == TABLE_OF_RELEASED["parameters"]


WITH = """
from types import SimpleNamespace
import torch
from megagrpo.actor.host import prepare_host
prepare_host(transformer_engine=True)
from megatron.core import optimizer, tensor_parallel
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megagrpo.actor.megatron_config import kernels_here, transformer_config
from megagrpo.models.build import build_chunks, chunk_parameters, load_hf
from tests.pretended_world import pretended_world
from megagrpo.config.actor import ActorConfig
from examples.laptop.recipe import TinyModelConfig
from megagrpo.models.table import architecture_of
from megagrpo.tools.certify.tiny_model import hf_config, random_tensors
from megagrpo.weights.expected_digests import ExpectedDigests
from megagrpo.weights.copies.recorder import Copy, record_whole
from megagrpo.weights.transports.reshard_plan import trainer_atoms

assert optimizer.Adam.__module__.startswith("transformer_engine") and distrib_optimizer.USING_TE_OPTIMIZER
# Megatron-Core 0.19 takes Transformer Engine's norm together with a function that came with 2.14
assert clip_grads.multi_tensor_scale_tensor_impl.__module__.startswith("transformer_engine")
# but not for gradients of several types, which its kernels would misread
mixed = [torch.full((7,), 3.0), torch.full((5,), 5.0, dtype=torch.bfloat16), torch.full((3,), 2.0)]
norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, None, [mixed], False)
assert torch.equal(norm, torch.tensor([200.0]).sqrt()), norm
parameters = [torch.nn.Parameter(torch.zeros_like(values)) for values in mixed]
for parameter, values in zip(parameters, mixed, strict=True):
    parameter.decoupled_grad = values
clip_grads.clip_grad_by_total_norm_fp32(parameters, 1.0, 2.0, use_decoupled_grad=True)
half = [torch.full_like(values, expected) for values, expected in zip(mixed, (1.5, 2.5, 1.0))]
assert all(map(torch.allclose, mixed, half)), mixed


def rank_of(arch, config, hf, rank):
    with pretended_world(config, rank):
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        kernels = kernels_here(config)
        chunks = build_chunks(arch, config, transformer_config(arch, config, kernels), kernels, torch.device("cpu"))
        live = chunk_parameters(chunks)
        copies = record_whole(lambda hf: load_hf(chunks, arch, hf), specs_of(hf), live).copies
        load_hf(chunks, arch, hf)
    return copies, {name: values.detach() for name, values in live.items()}


def specs_of(hf):
    return {name: (tuple(values.shape), values.dtype) for name, values in hf.items()}


def digests_of(everyone, hf):
    shapes = {name: shape for name, (shape, _) in specs_of(hf).items()}
    slices = [Copy(name, (0,) * len(shape), shape, "", 0, (0,) * len(shape)) for name, shape in shapes.items()]
    total = 0
    for rank, (_, live) in enumerate(everyone):
        mesh = SimpleNamespace(rank=rank, world_size=1, device=torch.device("cpu"))
        copies = [copies for copies, _ in everyone]
        digests = ExpectedDigests(
            SimpleNamespace(mesh=mesh, copies=copies, specs=specs_of(hf), parameters=lambda live=live: live)
        )
        digests.add([slices])
        total = total + digests.local()
    return total.tolist()


def boxes_of(everyone, hf):
    atoms = trainer_atoms([copies for copies, _ in everyone], specs_of(hf))
    return {name: [(atom.copy.box, atom.ranks) for atom in parts] for name, parts in atoms.items()}


cases = (
    ("qwen3", {"tp": 2}),
    ("qwen3_moe", {"ep": 2, "tp": 2, "pp": 2}),
    ("qwen3_moe", {"tp": 2, "etp": 2}),
    ("deepseek_v3", {"tp": 2, "ep": 2}),
    ("glm4_moe", {"ep": 2}),
    ("minimax_m2", {"tp": 2}),
    ("nemotron_h", {"tp": 2, "ep": 2}),
)
for family, parallel in cases:
    arch = architecture_of(hf_config(TinyModelConfig(path="x", family=family)))
    hf = random_tensors(arch, torch.Generator().manual_seed(0))
    found = {}
    for engine in (False, True):
        world = 4 if "pp" in parallel else 2
        config = ActorConfig(world_size=world, parallel=parallel, transformer_engine=engine)
        everyone = [rank_of(arch, config, hf, rank) for rank in range(config.world_size)]
        found[engine] = boxes_of(everyone, hf), digests_of(everyone, hf)
    grouped = any(name.endswith("experts.linear_fc1.weight0") for name in everyone[0][1])
    assert grouped == (arch.is_moe), "its experts are grouped"
    assert found[False] == found[True] and len(set(found[True][1])) > len(hf) // 2, family
# norms before Mamba-2 in FP8, which are computed again; for experts in FP8 nothing stands in
parts = ["mamba", "mlp", "attention", "mlp"]
arch = architecture_of({**hf_config(TinyModelConfig(path="x", family="nemotron_h")), "layers_block_type": parts})
fp8 = {"fp8": "e4m3", "fp8_recipe": "tensorwise"}
config = ActorConfig(transformer_engine=True, recompute="selective", megatron=fp8)
rank_of(arch, config, random_tensors(arch, torch.Generator().manual_seed(0)), 0)
print("ok")
"""


def test_what_is_published_with_it():
    """Recorded copies, who holds which part of every tensor, and digests of the live weights, as with torch's layers.

    What its Adam computes: tests/dist/test_optimizer_variants.py.
    """
    assert run(WITH) == ["ok"]


WITHOUT = """
import torch
from megagrpo.actor import host
share, load = [], host._internals


def internals():
    module = load()
    if not share:
        share.append(module.share_angles)
        module.share_angles = lambda: None
    return module


host._internals = internals
host.prepare_host()
from megatron.core.models.common.embeddings import rope_utils
theirs = rope_utils._apply_rotary_pos_emb_bshd, rope_utils._apply_rotary_pos_emb_thd
share[0]()
ours = rope_utils._apply_rotary_pos_emb_bshd, rope_utils._apply_rotary_pos_emb_thd
assert not set(ours) & set(theirs)


class Group:
    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


torch.manual_seed(0)
lengths, freqs = [8, 4, 16, 0, 12], 3 * torch.randn(16, 1, 1, 6)
cu = torch.tensor([0, *lengths]).cumsum(0).int()
for latent in (False, True):
    whole = torch.randn(16, 2, 3, 8)
    assert torch.equal(*(f(whole, freqs, False, latent, 1.2) for f in (theirs[0], ours[0])))
    for place in (Group(0, 1), Group(0, 2), Group(1, 2)):
        packed = torch.randn(sum(lengths) // place.size(), 3, 8)
        first, again = (ours[1](packed, cu, freqs, False, latent, 1.2, place) for _ in range(2))
        expected = theirs[1](packed, cu, freqs, False, latent, 1.2, place)
        assert torch.equal(first, expected) and torch.equal(again, expected)
        cu = cu.clone()  # what is known of it is of one layout
        exact = theirs[1](packed.bfloat16().double(), cu, freqs.double(), False, latent, 1.2, place)
        cu = cu.clone()
        rounded = ours[1](packed.bfloat16(), cu, freqs, False, latent, 1.2, place)
        assert rounded.dtype == torch.bfloat16 and (rounded != exact.bfloat16()).float().mean() < 0.01
        cu = cu.clone()
    exact = theirs[0](whole.bfloat16().double(), freqs.double(), False, latent, 1.2).bfloat16()
    found = [f(whole.bfloat16(), freqs, False, latent, 1.2) for f in (theirs[0], ours[0])]
    off = [float((values != exact).float().mean()) for values in found]
    assert off[1] < 0.01 and off[0] > 0.1, off
read = []
values = torch.Tensor.tolist, torch.Tensor.item
torch.Tensor.tolist = torch.Tensor.item = lambda self: read.append(1)
ours[1](packed, cu, freqs, False, False, 1.0, place)
torch.Tensor.tolist, torch.Tensor.item = values
assert not read, "it read a value back"
from megatron.core import optimizer
from megatron.core.optimizer import clip_grads, distrib_optimizer
print(optimizer.Adam.__module__, optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.USING_TE_OPTIMIZER)
print(clip_grads.l2_norm_impl.__module__)
"""


def test_without_its_layers_megatron_does_not_find_it():
    """Installed, it would give Megatron its optimizer and its norms, which need CUDA, whatever the layers are.

    Rotary embeddings are ours then: to the last bit Megatron's in float32; in bfloat16 rounded once, at the end; and no
    length is read back.
    """
    norms = "megagrpo.models.internals_0_19"  # which wait for the device once
    assert run(WITHOUT) == ["torch.optim.adamw", "True", "False", norms]
