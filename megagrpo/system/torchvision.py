"""torchvision, which transformers imports: operators for a CPU, and import problems."""

import importlib
import importlib.util


def prepare_torchvision() -> None:
    """Makes transformers importable beside a torch without CUDA; see cpu/torchvision_ops.py."""
    import torch

    if torch.version.cuda is None:
        importlib.import_module("megagrpo.cpu.torchvision_ops").define_torchvision_operators()


def torchvision_problem() -> str:
    """Returns why torchvision cannot be imported, with the remedy; "" if it can be or is absent."""
    if importlib.util.find_spec("torchvision") is None:
        return ""
    try:
        importlib.import_module("torchvision")
    # of a wrong build, or of a repeated import
    except (ImportError, OSError, RuntimeError, AttributeError) as exc:
        return (
            "; torchvision, which transformers imports, cannot be imported: "
            f"{type(exc).__name__}: {exc}: `bash launch/install.sh --repair` installs the one "
            "that goes with this torch"
        )
    return ""
