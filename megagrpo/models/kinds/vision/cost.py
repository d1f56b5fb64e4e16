"""The cost of a vision tower. No torch."""

from megagrpo.models.kinds.vision.describe import Vision


def engine_weights(vision: Vision | None, tp: int) -> float:
    """Counts the weights of a vision tower that one rank of an engine holds; 0 without a tower.

    Matrices of blocks and mergers, and biases of their outputs, are divided; embeddings of patches
    and biases behind a sum over ranks are whole.
    """
    if vision is None:
        return 0
    whole = divided = 0
    for spec in vision.tensors():
        *_, module, kind = spec.name.split(".")
        summed = module in ("proj", "down_proj", "linear_fc2", "2")
        if (
            spec.kind == "norm"
            or "norm" in spec.name
            or "patch_embed" in spec.name
            or (summed and kind == "bias")
        ):
            whole += spec.size
        else:
            divided += spec.size
    return whole + divided / tp
