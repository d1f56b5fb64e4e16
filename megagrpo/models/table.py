"""The table of model families, and lookups in it.

To add a family: a subclass of `Family` in models/, its row in FAMILIES, and one of a tiny model in
tools/certify/tiny.yaml. The actor, `megagrpo check` and the certificate then support it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from megagrpo.config.actor import ParallelConfig
from megagrpo.models.architecture import Architecture
from megagrpo.models.config_json import HfConfig, text_part
from megagrpo.models.costs import FP32, Share
from megagrpo.models.families.deepseek_v3 import DeepseekV3, Glm4MoeLite, KimiK25
from megagrpo.models.families.deepseek_v4 import DeepseekV4
from megagrpo.models.families.glm5_next import Glm5Next
from megagrpo.models.families.gpt_oss import GptOss
from megagrpo.models.families.kimi_linear import KimiLinear
from megagrpo.models.families.minimax_m2 import MiniMaxM2
from megagrpo.models.families.nemotron_h import NemotronH
from megagrpo.models.families.qwen3_5 import Qwen3Next, Qwen4Exp, Qwen35, Qwen35Moe
from megagrpo.models.families.sigmoid_moe import Glm4Moe
from megagrpo.models.families.softmax_moe import Llama, Mixtral, Qwen2, Qwen3, Qwen3Moe
from megagrpo.models.families.sparse_attention import DeepseekV32, GlmMoeDsa
from megagrpo.models.families.vision_language import Qwen3VL, Qwen3VLMoe, Qwen25VL
from megagrpo.models.family import Family
from megagrpo.models.kinds.draft.describe import draft_norms
from megagrpo.models.kinds.ngrams.describe import TABLE, NGrams
from megagrpo.models.stored.quantization import (
    dequantized_config,
    quantization_problems,
    stored_form,
)
from megagrpo.models.tensors import TensorSpec, adapter_tensors, layer_prefix
from megagrpo.system.errors import git_lfs_hint, translated

# model_type of config.json -> the family's module
FAMILIES: dict[str, Family] = {
    "llama": Llama(),
    "qwen2": Qwen2(),
    "qwen3": Qwen3(),
    "qwen3_moe": Qwen3Moe(),
    "mixtral": Mixtral(),
    "glm4_moe": Glm4Moe(),
    "glm4_moe_lite": Glm4MoeLite(),
    "deepseek_v3": DeepseekV3(),
    "kimi_k2": DeepseekV3(),
    "qwen2_5_vl": Qwen25VL(),
    "qwen3_vl": Qwen3VL("language_model."),
    "qwen3_vl_moe": Qwen3VLMoe("language_model."),
    "qwen3_5_moe": Qwen35Moe("language_model."),
    "qwen3_5_moe_text": Qwen35Moe(),
    "qwen3_5": Qwen35("language_model."),
    "qwen3_5_text": Qwen35(),
    "minimax_m2": MiniMaxM2(),
    "kimi_k25": KimiK25(),
    "deepseek_v32": DeepseekV32(),
    "glm_moe_dsa": GlmMoeDsa(),
    "qwen3_next": Qwen3Next(),
    "gpt_oss": GptOss(),
    "nemotron_h": NemotronH(),
    "deepseek_v4": DeepseekV4(),
    "kimi_linear": KimiLinear(),
    "qwen4_exp": Qwen4Exp("language_model."),
    "glm5_next": Glm5Next("language_model."),
}
# model_type -> what its layers have that no kind here has
_UNBUILT = {
    "kimi_k3": "its layers take sums of earlier blocks in place of a residual stream "
    "(attn_res_block_size), which pipeline stages here do not hand on; its gates of latent "
    "attention, bounded decays, norm behind latent experts and activation (situ) are not built either",
}
_PREDICTION_LAYERS = "num_nextn_predict_layers"
_LEFT_OUT = {"mtp.": "multi-token-prediction layers, which only speculate"}


@dataclass(frozen=True)
class ParameterCounts:
    """Counts a model's parameters; embeddings and output layer are dense, tied ones count once."""

    dense: int  # with tables of n-grams, which are frozen
    expert: int  # of all routed experts
    active: int  # that one token is multiplied with; its row of an untied input embedding is not

    @property
    def total(self) -> int:
        """Counts all parameters."""
        return self.dense + self.expert


def model_problems(hf: HfConfig, draft: bool = False) -> list[str]:
    """Returns why a config.json cannot be read, its draft included if asked; [] when
    `architecture_of` can."""
    name = hf.get("model_type")
    if why := _UNBUILT.get(str(name)):
        return [f"model_type {name!r} is not supported: {why}"]
    if name not in FAMILIES:
        return [f"model_type {name!r} is not supported; supported: {', '.join(FAMILIES)}"]
    hf = text_part(hf)
    problems = [*quantization_problems(hf), *FAMILIES[name].refusals(hf)]
    layers = hf.get(_PREDICTION_LAYERS) or 0
    if draft and (why := FAMILIES[name].DRAFT_REFUSAL):
        problems.append(f"actor.draft is not supported with a {name} model: {why}")
    elif draft and layers != 1:
        found = f"{_PREDICTION_LAYERS} is {layers} here"
        problems.append(f"actor.draft needs a model with one multi-token-prediction layer; {found}")
    return problems


def architecture_of(hf: HfConfig, draft: bool = False, where: str = "") -> Architecture:
    """Reads the parsed config.json of a model, its draft included if asked. Raises ValueError with
    every problem.

    where: begins its message.
    """
    if problems := model_problems(hf, draft):
        raise ValueError(where + "; ".join(problems))
    return replace(FAMILIES[hf["model_type"]].architecture(text_part(hf)), draft=draft)


def read_description(path: Path) -> dict[str, Any]:
    """Returns the values of a model folder's config.json or its like; {} if there is no such file.

    Raises ValueError, naming the file, when it is not JSON.
    """
    problem = f"{path}: not a model description{git_lfs_hint(path)}"
    with translated(problem, json.JSONDecodeError, UnicodeDecodeError):
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def model_tensors(arch: Architecture) -> Iterator[TensorSpec]:
    """Yields every tensor of the HF checkpoint, in the order in which a random model draws them."""
    family = FAMILIES[arch.family]
    for spec in text_tensors(arch):
        stored = family.stored_name(spec.name)
        yield spec if stored == spec.name else replace(spec, name=stored)
    if arch.vision is not None:
        yield from arch.vision.tensors()
    yield from table_tensors(family, arch.ngrams)


def table_tensors(family: Family, ngrams: NGrams | None) -> Iterator[TensorSpec]:
    """Yields the tensors that stay in their files, of which layers read rows: frozen, no parameters,
    not published, and exported as they are."""
    if ngrams is None:
        return
    for index in ngrams.layers:
        for spec in ngrams.table(index):
            yield replace(spec, name=family.stored_name(spec.name))


def text_tensors(arch: Architecture) -> Iterator[TensorSpec]:
    """Yields the tensors of the text part, under the names that text models have."""
    vocabulary = (arch.vocab_size, arch.hidden_size)
    yield TensorSpec("model.embed_tokens.weight", vocabulary, "matrix")
    for index in range(arch.num_layers):
        yield from FAMILIES[arch.family].layer_tensors(arch, index)
    if arch.norms:
        yield TensorSpec("model.norm.weight", (arch.hidden_size,), arch.norm)
    if arch.streams is not None:
        yield from arch.streams.head_tensors(arch.hidden_size)
    if not arch.tied:
        yield TensorSpec("lm_head.weight", vocabulary, "matrix")
    if arch.draft:
        yield from draft_norms(arch)
        yield from FAMILIES[arch.family].layer_tensors(arch, arch.num_layers)


_EXPERT = re.compile(r"\.experts\.\d+\.")


@lru_cache(maxsize=16)
def tensor_groups(
    arch: Architecture, lora: tuple[tuple[str, ...], int] | None
) -> Mapping[TensorSpec, int]:
    """Counts the model's and its adapters' tensors; the experts of a layer, which are alike, are
    one tensor.

    Those of the text part have the names of text models. lora: targets and rank.
    """
    model = [*text_tensors(arch), *(arch.vision.tensors() if arch.vision is not None else ())]
    adapters = [] if lora is None else list(adapter_tensors(model, *lora))
    return Counter(
        replace(spec, name=_EXPERT.sub(".experts.0.", spec.name)) if spec.expert else spec
        for spec in model + adapters
    )


def parameter_counts(arch: Architecture) -> ParameterCounts:
    """Counts the parameters of a whole model."""
    counts = _counted(arch, tensor_groups(arch, None))
    looked_up = 0 if arch.tied else arch.vocab_size * arch.hidden_size
    tables = sum(spec.size for spec in table_tensors(FAMILIES[arch.family], arch.ngrams))
    return replace(counts, dense=counts.dense + tables, active=counts.active - looked_up)


def _counted(arch: Architecture, groups: Mapping[TensorSpec, int]) -> ParameterCounts:
    expert = sum(number * spec.size for spec, number in groups.items() if spec.expert)
    dense = sum(number * spec.size for spec, number in groups.items() if not spec.expert)
    experts = arch.experts
    share = expert * experts.per_token // experts.count if experts else 0
    return ParameterCounts(dense=dense, expert=expert, active=dense + share)


@lru_cache(maxsize=16)
def _products(arch: Architecture) -> int:
    """Counts the elements of all matrices of the text part that a token meets, routers left out."""
    groups = tensor_groups(replace(arch, vision=None, draft=False), None)
    matrices = [
        spec
        for spec in groups
        if spec.kind == "matrix" and not spec.name.endswith((".gate.weight", ".router.weight"))
    ]
    layer_groups = {spec: groups[spec] for spec in matrices if ".layers." in spec.name}
    return _counted(arch, layer_groups).active + arch.vocab_size * arch.hidden_size


@lru_cache(maxsize=16)
def attention_length(arch: Architecture) -> int:
    """Returns the sequence length, in tokens, at which attention costs as much as all other matrix
    products.

    Those of attention are products with all keys of a sequence, as trainers compute them, under masks
    too; what sees no more than a window counts as none.
    """
    attention = arch.attention
    cost = attention.cost(Share(arch.hidden_size, ParallelConfig(), 1, 1, FP32))
    pair = cost.pair_flops + cost.chosen_flops * (1 - attention.limited_share)
    # an element is two FLOPs, and a token meets half of the keys
    return max(int(4 * _products(arch) / max(pair * arch.attention_layers, 1)), 1)


def training_flops(arch: Architecture, lengths: Sequence[int], adapters: bool) -> float:
    """Returns the FLOPs of a forward and a backward of text samples, without what is computed again.

    A backward has twice a forward's; of adapters alone (LoRA) once, as frozen weights have no
    gradients.
    """
    pairs = sum(length * length for length in lengths) / attention_length(arch)
    return 2.0 * _products(arch) * (sum(lengths) + pairs) * (2 if adapters else 3)


def patch_cost(arch: Architecture) -> float:
    """Returns the matrix products of a patch in the vision tower over those of a token in the text
    part."""
    return 0.0 if arch.vision is None else arch.vision.products_of_a_patch / _products(arch)


def left_out(hf: HfConfig, draft: bool = False) -> list[str]:
    """Returns in words the parts of a model that are not loaded, trained or published; [] of one
    with `model_problems`.

    draft: whether actor.draft asks for the multi-token-prediction layer.
    """
    if model_problems(hf):
        return []
    kept = begin_of_kept(hf)
    hf = text_part(hf)
    layers = hf.get(_PREDICTION_LAYERS) or 0
    family = FAMILIES[hf["model_type"]]
    found = [
        f"{name}*: {_LEFT_OUT.get(name, 'only texts are trained')}"
        + ", exports have the model's own" * (name in kept)
        for name in family.LEFT_OUT
    ]
    if ngrams := family.ngrams(hf):
        tables = sum(spec.size for spec in table_tensors(family, ngrams))
        found.append(
            f"{tables / 1e9:.1f} B numbers of n-grams (ple_embedding): frozen, trainers and engines read "
            "them from the files, exports have the model's own"
        )
    if not layers or draft or "mtp." in kept:
        return found
    first = hf["num_hidden_layers"]
    names = f"{family.LAYERS}{first}" + f" to {first + layers - 1}" * (layers > 1)
    return [
        *found,
        f"{layers} multi-token-prediction layer{'s' * (layers > 1)} ({names}), which only speculate",
    ]


def begin_of_kept(hf: HfConfig) -> tuple[str, ...]:
    """Returns what the names of tensors begin with that are left out, but that the config.json of
    an export describes."""
    family = FAMILIES.get(str(hf.get("model_type")))
    if family is None or exported_config(hf).get("model_type") != hf.get("model_type"):
        return ()
    ngrams = family.ngrams(text_part(hf))
    own = [layer_prefix(index) + TABLE for index in ngrams.layers] if ngrams else []
    return (*family.LEFT_OUT, *map(family.stored_name, own))


def has_draft(names: Iterable[str]) -> bool:
    """Returns whether the tensors of a checkpoint, by their names, are also those of a draft."""
    return any(name.endswith(".eh_proj.weight") for name in names)


def is_left_out(arch: Architecture, tensor: str) -> bool:
    """Returns whether a tensor of a checkpoint is ignored: listed by `left_out`, or determined by
    config.json.

    Some tied models store their output layer, too; it is the input embedding, whatever the file
    contains. A draft's copies of input embedding and output layer are the model's.
    """
    family = FAMILIES[arch.family]
    if (
        tensor.endswith("rotary_emb.inv_freq")
        or tensor.startswith(family.LEFT_OUT)
        or (TABLE in tensor and ".shard_" not in tensor)  # numbers of hashes
        or (tensor == "lm_head.weight" and arch.tied)
    ):
        return True
    layer = re.fullmatch(rf"{re.escape(family.LAYERS)}(\d+)\.(.+)", tensor)
    if layer is None or int(layer[1]) < arch.num_layers:
        return False
    return not arch.draft or layer[2] in ("embed_tokens.weight", "shared_head.head.weight")


def exported_config(hf: HfConfig, draft: bool = False) -> dict[str, object]:
    """Returns the config.json for export and publish: without quantization and ignored layers."""
    family = FAMILIES.get(str(hf.get("model_type")))
    plain = dequantized_config(family.exported_config(hf) if family else hf)
    # the files of an export still have them under names of their own
    apart = family is not None and "mtp." in family.LEFT_OUT
    return plain if draft or apart else _without_speculation(plain)


def _without_speculation(hf: HfConfig) -> dict[str, object]:
    own: dict[str, object] = {_PREDICTION_LAYERS: 0} if hf.get(_PREDICTION_LAYERS) else {}
    if text := hf.get("text_config"):
        own["text_config"] = _without_speculation(text)
    return {**hf, **own}


def stored_otherwise(hf: HfConfig) -> str | None:
    """Returns in words how a model's folder differs from what engines run; None if it does not."""
    if form := stored_form(text_part(hf)):
        return f"in {form}"
    same = exported_config(hf).get("model_type") == hf.get("model_type")
    return None if same else f"as a part of a {hf['model_type']} model"
