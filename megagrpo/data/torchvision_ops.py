"""Makes transformers importable if torchvision is built for another device than torch.

PyPI's torchvision is linked to CUDA. With a CPU build of torch its C extension does not load; torchvision then fails at
undefined operators, and with it every transformers model that also imports image or video code, such as Llama.
"""

import importlib
import importlib.util
from pathlib import Path

from megagrpo.system.explained import explained

_kept: list[object] = []  # operators live as long as the library object that defined them


def define_torchvision_operators() -> None:
    """Declares, without code, the operators that an unloadable torchvision lacks. No text model calls them.

    Does nothing if torchvision loads or is absent, or if they are declared (engine processes have their own fix). Call
    it before importing transformers.
    """
    import torch

    spec = importlib.util.find_spec("torchvision")  # found, not imported
    extension = Path(spec.origin).parent / "_C.so" if spec is not None and spec.origin else None
    if extension is None or not extension.is_file() or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        torch.ops.load_library(str(extension))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


def torchvision_problem() -> str:
    """Returns why torchvision cannot be imported, with the remedy; "" if it can be or is absent."""
    if importlib.util.find_spec("torchvision") is None:
        return ""
    problem = "; torchvision, which transformers imports, cannot be imported"
    remedy = "`bash launch/install.sh --repair` installs the one that goes with this torch"
    try:
        with explained(problem, lambda exc: f": {remedy}"):
            importlib.import_module("torchvision")
    except ValueError as exc:
        return str(exc)
    return ""
