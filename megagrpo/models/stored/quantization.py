"""The quantization of a checkpoint by its config.json: FP8 in blocks, INT4 in groups and MXFP4, which
are read as bfloat16, or rejected.

Engines may have their weights in FP8, too: in the blocks of DeepSeek-V3.
"""

from megagrpo.models.config_json import HfConfig, text_part

_KEY = "quantization_config"
FP8_BLOCK = (128, 128)  # rows and columns with one scale, in engines
# What published FP8 files keep out of it: projections of gated delta nets with a row a head, and what
# SGLang has in bfloat16 of an indexer.
FP8_EXEMPT = ("in_proj_a", "in_proj_b", "in_proj_ba", "wk", "weights_proj")
SCALES = "_scale_inv"  # after a tensor's name: the name of its blocks' scales
# after the name of a weight in INT4: its words, its groups' scales and its shape
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
INT4_WORD = 8  # columns of INT4 in one int32
# after the name of a weight in MXFP4: its values and its blocks' scales; inputs with one scale
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"
MXFP4_BLOCK = 32


def quantization_problems(hf: HfConfig) -> list[str]:
    """Returns why a checkpoint with this config.json cannot be read; [] for none, for FP8 in
    blocks, for INT4 in groups and for MXFP4."""
    described = hf.get(_KEY)
    if not described:
        return []
    method = described.get("quant_method")
    if method == "compressed-tensors" and described.get("format") == "pack-quantized":
        return _packed_problems(described)
    if method == "mxfp4":
        return []
    if method != "fp8":
        bits = sorted(
            {int(group["num_bits"]) for group in _weight_groups(described) if "num_bits" in group}
        )
        width = f" ({' and '.join(map(str, bits))}-bit weights)" if bits else ""
        return [
            f"{_KEY}: quant_method {method!r}{width} is not read, only FP8 in blocks, "
            "INT4 in groups and MXFP4 are; training starts from the weights themselves, so name a release of "
            "the model in bfloat16, or convert it first"
        ]
    block = described.get("weight_block_size")
    problems = []
    if not (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(n, int) and n > 0 for n in block)
    ):
        problems.append(
            f"{_KEY}: weight_block_size is {block!r}, but FP8 is read in blocks only, "
            "[rows, columns] with one scale each (as [128, 128] of DeepSeek-V3)"
        )
    if described.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        problems.append(f"{_KEY}: fmt {described['fmt']!r} is not read; supported: e4m3")
    if described.get("activation_scheme", "dynamic") != "dynamic":
        problems.append(
            f"{_KEY}: activation_scheme {described['activation_scheme']!r} stores scales of "
            "activations, which are not read; supported: dynamic"
        )
    return problems


def fp8_block(hf: HfConfig) -> tuple[int, int] | None:
    """Returns rows and columns of a block with one scale; None for a checkpoint that is not in FP8.

    Raises ValueError with every problem of a quantization that is not read.
    """
    rows, columns = _read(hf).get("weight_block_size", (0, 0))
    return (rows, columns) if rows else None


def int4_group(hf: HfConfig) -> int | None:
    """Returns the columns of a group with one scale; None for a checkpoint that is not in INT4.

    Raises ValueError with every problem of a quantization that is not read.
    """
    described = _read(hf)
    return _weight_groups(described)[0]["group_size"] if "config_groups" in described else None


def _read(hf: HfConfig) -> HfConfig:
    if problems := quantization_problems(hf):
        raise ValueError("; ".join(problems))
    return hf.get(_KEY) or {}


def _packed_problems(described: HfConfig) -> list[str]:
    """Returns what is not Kimi-K2.5's in compressed-tensors' pack-quantized format."""
    groups = _weight_groups(described)
    found = groups[0] if len(groups) == 1 else {}
    wrong = [key for key, value in _INT4.items() if found.get(key) != value]
    size = found.get("group_size")
    if not isinstance(size, int) or size <= 0 or size % INT4_WORD:
        wrong.append("group_size")
    wrong += [key for key in ("actorder", "dynamic", "zp_dtype") if found.get(key)]
    given = ", ".join(f"{key} {found.get(key)!r}" for key in wrong)
    return wrong and [
        f"{_KEY}: pack-quantized weights in {len(groups)} config_groups with {given} are not read; "
        f"supported: one group with {_INT4} and a group_size that {INT4_WORD} divides"
    ]


def dequantized_config(hf: HfConfig) -> dict[str, object]:
    """Returns the config.json of the same model in bfloat16."""
    plain = {key: value for key, value in hf.items() if key != _KEY}
    if text := plain.get("text_config"):
        plain["text_config"] = dequantized_config(text)
    if len(plain) < len(hf):
        for key in {"dtype", "torch_dtype"} & plain.keys() or {"dtype"}:
            plain[key] = "bfloat16"
    return plain


def fp8_config(hf: HfConfig) -> dict[str, object]:
    """Returns the config.json of the same model in FP8, as DeepSeek-V3's names it: only FP8_EXEMPT
    is exempted by name."""
    method: dict[str, object] = {"quant_method": "fp8", "fmt": "e4m3"}
    method |= {"activation_scheme": "dynamic", "weight_block_size": list(FP8_BLOCK)}
    if text_part(hf).keys() & {"linear_num_key_heads", "index_topk"}:
        method["modules_to_not_convert"] = list(FP8_EXEMPT)
    return {**dequantized_config(hf), _KEY: method}


def stored_form(hf: HfConfig) -> str | None:
    """Returns "FP8", "MXFP4" or "INT4"; None for a checkpoint that is not quantized."""
    if not hf.get(_KEY):
        return None
    method = str(hf[_KEY].get("quant_method"))
    return method.upper() if method in ("fp8", "mxfp4") else "INT4"


def _weight_groups(described: HfConfig) -> list[HfConfig]:
    """Returns the weight settings of each group of layers (compressed-tensors), or of all
    (GPTQ)."""
    groups = [
        group.get("weights") or {} for group in (described.get("config_groups") or {}).values()
    ]
    return groups or ([{"num_bits": described["bits"]}] if "bits" in described else [])
