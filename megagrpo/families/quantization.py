"""The quantisation of a checkpoint by its config.json: FP8 in blocks, which is read as bfloat16, or
rejected.

Engines may have their weights in FP8, too: in the blocks of DeepSeek-V3.
"""

from megagrpo.families.architecture import HfConfig

_KEY = "quantization_config"
FP8_BLOCK = (128, 128)  # rows and columns with one scale, in engines
SCALES = "_scale_inv"  # after a tensor's name: the name of its blocks' scales


def quantization_problems(hf: HfConfig) -> list[str]:
    """Returns why a checkpoint with this config.json cannot be read; [] for none and for FP8 in
    blocks."""
    described = hf.get(_KEY)
    if not described:
        return []
    method = described.get("quant_method")
    if method != "fp8":
        bits = sorted(
            {int(group["num_bits"]) for group in _weight_groups(described) if "num_bits" in group}
        )
        width = f" ({' and '.join(map(str, bits))}-bit weights)" if bits else ""
        return [
            f"{_KEY}: quant_method {method!r}{width} is not read, only FP8 in blocks is; training "
            "starts from the "
            "weights themselves, so name a release of the model in bfloat16 or block FP8, or "
            "convert it first"
        ]
    block = described.get("weight_block_size")
    problems = []
    if not (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(n, int) and n > 0 for n in block)
    ):
        problems.append(
            f"{_KEY}: weight_block_size is {block!r}, but FP8 is read in blocks only, [rows, "
            "columns] with one scale "
            "each (as [128, 128] of DeepSeek-V3)"
        )
    if described.get("fmt", "e4m3") != "e4m3":
        problems.append(f"{_KEY}: fmt {described['fmt']!r} is not read; supported: e4m3")
    if described.get("activation_scheme", "dynamic") != "dynamic":
        problems.append(
            f"{_KEY}: activation_scheme {described['activation_scheme']!r} stores scales of "
            "activations, which are "
            "not read; supported: dynamic"
        )
    return problems


def fp8_block(hf: HfConfig) -> tuple[int, int] | None:
    """Returns rows and columns of a block with one scale; None for a checkpoint that is not
    quantised.

    Raises ValueError with every problem of a quantisation that is not read.
    """
    problems = quantization_problems(hf)
    if problems:
        raise ValueError("; ".join(problems))
    rows, columns = hf[_KEY]["weight_block_size"] if hf.get(_KEY) else (0, 0)
    return (rows, columns) if rows else None


def dequantised_config(hf: HfConfig) -> dict[str, object]:
    """Returns the config.json of the same model in bfloat16."""
    plain = {key: value for key, value in hf.items() if key != _KEY}
    if len(plain) < len(hf):
        for key in {"dtype", "torch_dtype"} & plain.keys() or {"dtype"}:
            plain[key] = "bfloat16"
    return plain


def fp8_config(hf: HfConfig) -> dict[str, object]:
    """Returns the config.json of the same model in FP8, as DeepSeek-V3's names it: no tensor is
    exempted by name."""
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return {**dequantised_config(hf), _KEY: method | {"weight_block_size": list(FP8_BLOCK)}}


def load_format_problems(hf: HfConfig, load_format: str) -> list[str]:
    """Returns why engines cannot start with `load_format`: they would read FP8 as if it were
    bfloat16."""
    if load_format == "dummy" or not hf.get(_KEY):
        return []
    return [
        f"rollout.load_format = {load_format}, but the model is stored in FP8: engines run it in "
        "bfloat16, as it is "
        "trained, and do not read its files; use dummy, the first publish fills them"
    ]


def _weight_groups(described: HfConfig) -> list[HfConfig]:
    """Returns the weight settings of each group of layers (compressed-tensors), or of all
    (GPTQ)."""
    groups = [
        group.get("weights") or {} for group in (described.get("config_groups") or {}).values()
    ]
    return groups or ([{"num_bits": described["bits"]}] if "bits" in described else [])
